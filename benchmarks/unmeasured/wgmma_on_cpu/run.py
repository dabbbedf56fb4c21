import sys,os,subprocess,random,struct
sys.path.insert(0,'/work/main/.scratch_f1'); sys.argv=sys.argv[:1]+sys.argv[1:]
from common import *
import numpy as np, wcand
def const(k):
    out=[]
    for n,v in k.constants:
        out.append('constexpr bool %s = %s;'%(n,'true' if v else 'false') if isinstance(v,bool) else 'constexpr int %s = %d;'%(n,v) if isinstance(v,int) else 'using %s = %s;'%(n,v))
    return '\n'.join(out)
def emulate(p,t,tag,kernel='/work/main/csrc/kernels/forward_wgmma.cu'):
    pl=pt.plan_with_tile(p,t); g=p.geometry; d='/work/f1/emu/b%s'%tag; os.makedirs(d,exist_ok=True)
    x=torch.randn(g.input_shape); w=torch.randn(g.weight_shape)*(g.in_channels_per_group*g.taps)**-.5; b=torch.randn(g.out_channels) if p.has_bias else None
    x=x.to(p.dtype); w=w.to(p.dtype); b=None if b is None else b.to(p.dtype)
    ref=torch.nn.functional.conv_transpose2d(x.double(),w.double(),None if b is None else b.double(),GEO.stride,g.padding,g.output_padding,g.groups,g.dilation)
    fm=torch.channels_last
    xs=(x.permute(0,2,3,1) if p.output_channels_last else x).contiguous()
    ws=(w.permute(0,2,3,1) if p.weight_channels_last else w).contiguous()
    def by(a): return a.contiguous().view(torch.uint8).numpy().tobytes() if a is not None else b''
    for n,a in (('x',xs),('w',ws),('b',b)): open(d+'/'+n,'wb').write(by(a))
    import shutil; shutil.copy('/work/main/csrc/kernels/pack_weights.cu',d+'/pack_weights.cu'); shutil.copy(kernel,d+'/kernel.cu')
    common='#include "emu.h"\n'
    pk=pl.launches[0]; fw=pl.launches[1]; outn=ref.numel(); sp=t.splits
    if p.item!=2 and sp>1: pass
    # pack program
    main_pack='''
static bool packing=true; constexpr int NTHREADS=1;
#include "%s"
#include "/work/f1/emu/harness.cpp"
std::vector<char> rd(const char*f){FILE*h=fopen(f,"rb");fseek(h,0,2);long n=ftell(h);rewind(h);std::vector<char> v(n+64);if(n)n=fread(v.data(),1,n,h);fclose(h);return v;}
int main(){ auto w=rd("%s/w"); std::vector<unsigned> out(%d/4+4,0xffffffffu); gridDim.x=%d; for(blockIdx.x=0;blockIdx.x<gridDim.x;blockIdx.x++) for(threadIdx.x=0;threadIdx.x<THREADS;threadIdx.x++) pack_weights((const Element*)w.data(),out.data()); FILE*h=fopen("%s/p","wb");fwrite(out.data(),1,%d,h);fclose(h);}
'''%(d+'/pack_weights.cu',d,pl.workspace_bytes,pk.grid,d,pl.workspace_bytes if sp==1 else fw.arguments[3].value)
    src='constexpr int SHARED_BYTES=1<<18;\n#include "emu.h"\n'+const(pk.kernel)+main_pack
    open(d+'/pack.cpp','w').write(src)
    ot='float' if sp>1 else 'Element'
    main_fwd='''
static bool packing=false; 
#include "%s"
constexpr int NTHREADS=THREADS;
#include "/work/f1/emu/harness.cpp"
std::vector<char> rd(const char*f){FILE*h=fopen(f,"rb");fseek(h,0,2);long n=ftell(h);rewind(h);char* q=(char*)aligned_alloc(256,(n+511)/256*256);if(n)n=fread(q,1,n,h);fclose(h);std::vector<char> v;in_lo=q;in_hi=q+n;return std::vector<char>(q,q+n);}
char* rd2(const char*f,long&n){FILE*h=fopen(f,"rb");fseek(h,0,2);n=ftell(h);rewind(h);char* q=(char*)aligned_alloc(256,(n+511)/256*256);if(n&&fread(q,1,n,h)!=(size_t)n)abort();fclose(h);return q;}
const Element*X;const unsigned*P;const Element*B;Out*Y;
void* th(void*a){ threadIdx.x=(int)(long)a; for(int bl=0;bl<gridDim.x;bl++){ if(threadIdx.x==0){blockIdx.x=bl; memset(shared,0xff,sizeof(shared));} pthread_barrier_wait(&bar); forward_wgmma(X,P,B,Y,%dLL); pthread_barrier_wait(&bar);} return 0;}
int main(){ long nx,np,nb; X=(const Element*)rd2("%s/x",nx);P=(const unsigned*)rd2("%s/p",np);B=(const Element*)rd2("%s/b",nb); in_lo=(const char*)X; in_hi=in_lo+nx; long no=%dL; Y=(Out*)malloc(no*sizeof(Out)); memset(Y,0xff,no*sizeof(Out)); gridDim.x=%d; pthread_barrier_init(&bar,0,NTHREADS); pthread_t t[NTHREADS]; for(long i=0;i<NTHREADS;i++) pthread_create(t+i,0,th,(void*)i); for(int i=0;i<NTHREADS;i++) pthread_join(t[i],0); FILE*h=fopen("%s/y","wb");fwrite(Y,sizeof(Out),no,h);fclose(h);}
'''%(d+'/kernel.cu',g.batch,d,d,d,outn*sp,min(fw.grid,int(os.environ.get('GRID','1000000000'))),d)
    open(d+'/fwd.cpp','w').write('#include "emu_cfg.h"\n'+'#include "emu.h"\n'+const(fw.kernel)+main_fwd)
    open(d+'/emu_cfg.h','w').write('')
    flags=[*os.environ.get('SAN','').split(),'-O1','-std=gnu++17','-w','-fno-strict-aliasing','-I',d,'-I','/work/f1/emu/inc','-pthread']
    for nm in ('pack','fwd'):
        r=subprocess.run(['g++',*flags,d+'/%s.cpp'%nm,'-o',d+'/'+nm],capture_output=True,text=True)
        if r.returncode: return 'compile '+r.stderr[:1500]
        r=subprocess.run([d+'/'+nm],capture_output=True,text=True,timeout=200)
        if r.returncode: return 'run %s %d %s'%(nm,r.returncode,r.stdout[:200])
    y=np.fromfile(d+'/y',dtype=np.float32 if (sp>1 or p.item==4) else np.float16).astype(np.float64)
    y=torch.from_numpy(y)
    if sp>1:
        y=y.view(sp,-1).sum(0); 
    y=y.view(ref.permute(0,2,3,1).shape).permute(0,3,1,2) if p.output_channels_last else y.view(ref.shape)
    if sp>1 and b is not None: y=y+b.double().view(1,-1,1,1)
    return ((y-ref).norm()/ref.norm()).item()
seed=int(sys.argv[1]); n=int(sys.argv[2]); only=sys.argv[3] if len(sys.argv)>3 else 'any'; kernel=sys.argv[4] if len(sys.argv)>4 else '/work/main/csrc/kernels/forward_wgmma.cu'
r=random.Random(seed); done=0; bad=0
while done<n:
    gr=r.choice([1,1,2]); cig=r.choice([8,16,24,5,33]); cog=r.choice([8,16,24,33,40,64,70])
    k=(r.randint(1,4),r.randint(1,4)); s=(r.randint(1,3),r.randint(1,3)); pad=(r.randint(0,2),r.randint(0,2)); dl=(r.choice([1,1,2]),r.choice([1,1,2])); op=(r.randint(0,max(s[0],dl[0])-1),r.randint(0,max(s[1],dl[1])-1))
    if only=='gap': s=(r.randint(2,4),r.randint(2,4)); k=(r.randint(1,s[0]),r.randint(1,s[1])); pad=(0,0); dl=(1,1); op=(r.randint(0,s[0]-1),r.randint(0,s[1]-1))
    elif only=='flat' or r.random()<.3: s=(r.randint(1,4),r.randint(1,4)); k=s; pad=op=(0,0); dl=(1,1)
    h,w=r.choice([(1,1),(2,4),(4,4),(3,3),(5,7),(8,8),(7,9),(9,13),(3,21),(1,19),(12,10)])
    GEO=Geometry(r.choice([1,2,3]),cig*gr,h,w,cog*gr,k,s,pad,op,dl,gr)
    if GEO.out_height<1 or GEO.out_width<1: continue
    mode=r.choice(['tf32','fp16']); cl=r.random()<.5
    p=problem(GEO,mode,cl,r.random()<.5,r.random()<.5)
    if not plan_tile._claims(p,'sm_90a'): continue
    q=plan_tile._stacked(p) if r.random()<.7 else p
    c=[t for t in plan_tile._wgmma_tiles(q) if pt.shared_bytes(q,t)<=227*1024]
    if not c: continue
    if only=='flat' and not q.flat: continue
    t=r.choice(c)
    from dataclasses import replace
    if r.random()<.2 and -(-q.words//t.chunk_words)>=2: t=replace(t,splits=2)
    e=emulate(q,t,str(seed),kernel); done+=1
    ok=isinstance(e,float) and e<(6e-4 if mode=='tf32' else 6e-4)
    bad+=not ok
    print('ok' if ok else 'BAD',e,GEO,GEO.input_shape,mode,'cl' if cl else 'nchw','flat' if q.flat else '','stack%d'%q.stack,t.splits,t,flush=True)
print('done',done,'bad',bad)
