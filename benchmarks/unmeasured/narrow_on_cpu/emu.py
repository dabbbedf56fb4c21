import sys, subprocess, ctypes, random, hashlib, re, os
from layers import *
from run1geo import rgeo
from tconv_swap import plan_narrow as pn, jit
K='/work/main/csrc/kernels/'
PRE=r'''
#include <ucontext.h>
#include <cstdlib>
#include <cstring>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__
struct float4{float x,y,z,w;}; struct float2{float x,y;};
inline float4 make_float4(float a,float b,float c,float d){return {a,b,c,d};} inline float2 make_float2(float a,float b){return {a,b};}
struct U{unsigned x;}; static U threadIdx, blockIdx;
alignas(16) float4 shared[16384];
static std::vector<ucontext_t> ctx; static ucontext_t sched; static unsigned cur; static std::vector<char> done; static std::vector<char*> stacks;
static void __syncthreads(){ unsigned me=cur; swapcontext(&ctx[me],&sched); threadIdx.x=me; }
template<class T> struct Accumulate{using type=float;};
struct BFloat16{unsigned short bits;}; inline float load_as(float x){return x;} inline float load_as(BFloat16 x){unsigned u=(unsigned)x.bits<<16; float f; memcpy(&f,&u,4); return f;}
template<class T> T store_as(float x){return x;} template<> inline BFloat16 store_as<BFloat16>(float x){unsigned b; memcpy(&b,&x,4); return BFloat16{(unsigned short)((b+0x7fffu+((b>>16)&1u))>>16)};}
#ifndef ELT
#define ELT float
#endif
'''
POST=r'''
static const Element *gi,*gw,*gb; static Element* go; static long long gn,gr;
static void entry(){ forward_narrow(gi,gw,gb,go,gn,gr); done[cur]=1; swapcontext(&ctx[cur],&sched); }
extern "C" int run(const Element*i,const Element*w,const Element*b,Element*o,long long n,long long r,unsigned grid,unsigned block){
 gi=i;gw=w;gb=b;go=o;gn=n;gr=r; ctx.resize(block);done.resize(block);stacks.resize(block);
 for(auto&s:stacks) s=(char*)malloc(65536);
 for(unsigned bl=0;bl<grid;++bl){ blockIdx.x=bl; memset((void*)shared,0xff,sizeof shared);
  for(unsigned t=0;t<block;++t){ getcontext(&ctx[t]); ctx[t].uc_stack.ss_sp=stacks[t]; ctx[t].uc_stack.ss_size=65536; ctx[t].uc_link=&sched; makecontext(&ctx[t],entry,0); done[t]=0;}
  for(;;){ unsigned left=0,at=0; for(unsigned t=0;t<block;++t) if(!done[t]){ cur=t; threadIdx.x=t; swapcontext(&sched,&ctx[t]); if(!done[t]) ++left; }
    if(!left) break; unsigned d=0; for(unsigned t=0;t<block;++t) d+=done[t]; if(d) return 1; } // some threads left at a barrier others never reach
 }
 for(auto&s:stacks) free(s); return 0; }
'''
def build(kernel):
    consts='\n'.join(jit._render_constant(a,b) for a,b in kernel.constants)
    geo=open(K+'geometry.cuh').read().replace('#pragma once','')
    nar=open(K+'narrow.cuh').read().replace('#pragma once','').replace('#include "geometry.cuh"','')
    a=nar.index('template <int N, class T>\n__device__ __forceinline__ void copy_async'); b=nar.index('template <int N>\n__device__ __forceinline__ void write_vector')
    nar=nar[:a]+'template <int N,class T> void copy_async(float* to,const T* from,bool inside){ if(((size_t)to)%(4*N)) abort(); if(inside && ((size_t)from)%(4*N)) abort(); for(int i=0;i<N;++i) to[i]=inside?from[i]:0.0f; }\ninline void async_commit(){} inline void async_wait_all_but_last(){}\n'+nar[b:]
    src=PRE+consts+geo+nar+open(K+'forward_narrow.cu').read().replace('#include "narrow.cuh"','')+POST
    h=hashlib.md5(src.encode()).hexdigest(); so=f'/tmp/emu/{h}.so'
    if not os.path.exists(so):
        open(f'/tmp/emu/{h}.cpp','w').write(src)
        r=subprocess.run(['g++','-std=c++17','-O1','-w','-fno-strict-aliasing','-fsanitize=alignment','-fno-sanitize-recover=alignment','-fPIC','-shared','-o',so,f'/tmp/emu/{h}.cpp'],capture_output=True,text=True)
        if r.returncode: print(r.stderr[:3000]); raise SystemExit(1)
    return ctypes.CDLL(so)
def check(g,cl,wcl,bias,plan,dt=torch.float32):
    l=plan.launches[0]
    lib=build(l.kernel)
    x=torch.randn(g.input_shape); w=torch.randn(g.weight_shape); b=torch.randn(g.out_channels) if bias else None
    x,w,b=x.to(dt),w.to(dt),None if b is None else b.to(dt)
    if cl: x=x.contiguous(memory_format=torch.channels_last)
    if wcl: w=w.contiguous(memory_format=torch.channels_last)
    o=torch.full(g.output_shape,float('nan'),dtype=dt); 
    if cl: o=o.contiguous(memory_format=torch.channels_last)
    xs=x.untyped_storage()
    p=lambda t: ctypes.c_void_p(None if t is None else t.data_ptr())
    assert l.shared_bytes<=16384*16
    rep=[a.value for a in l.arguments if a.kind==3][1]
    rc=lib.run(p(x),p(w),p(b),p(o),ctypes.c_longlong(g.batch),ctypes.c_longlong(rep),ctypes.c_uint(l.grid),ctypes.c_uint(l.block))
    ref=torch.nn.functional.conv_transpose2d(x.double(),w.double(),None if b is None else b.double(),g.stride,g.padding,g.output_padding,g.groups,g.dilation)
    e=float((o.double()-ref).abs().max()/(ref.abs().max()+1e-9))
    return rc,e
if __name__=='__main__':
    rng=random.Random(int(sys.argv[2])); torch.manual_seed(0); torch.set_num_threads(1)
    n=0;bad=0
    while n<int(sys.argv[1]):
        g=rgeo(rng)
        if g.macs>4e6 or g.batch*g.out_channels*g.out_height*g.out_width>2e5: continue
        cl=rng.random()<.5; wcl=rng.random()<.3; b=rng.random()<.5; arch=rng.choice(['sm_75','sm_90','sm_90'])
        dt=rng.choice([torch.float32,torch.bfloat16]); p=pn.plan_narrow_forward(g,dt,'ieee',cl,wcl,b,arch,132 if rng.random()<.5 else 2,65536 if arch=='sm_75' else 232448)
        if p is None: print('None',g.batch,g.height,g.width,g); continue
        rc,e=check(g,cl,wcl,b,p,dt); n+=1
        if rc or not e<(1e-5 if dt==torch.float32 else 5e-3):
            bad+=1; print('WRONG',rc,e,g.batch,g.height,g.width,g,cl,wcl,b,arch,p.launches[0])
    print(n,'bad',bad)
