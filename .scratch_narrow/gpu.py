import sys, os, ctypes, time, json, random, statistics, re
os.environ['TCONV_SWAP_CACHE']='/tmp/tc'
from multiprocessing import get_context
from layers import *
from tconv_swap import plan_narrow as pn, jit
import torch
def comp(job):
    kernel, arch = job
    try:
        cubin, log = jit.compile_with_log(kernel, arch)
        m = re.search(r'Used (\d+) registers', log); s = re.search(r'(\d+) bytes spill stores', log)
        return kernel, cubin, int(m.group(1)), int(s.group(1))
    except Exception as e:
        return kernel, None, str(e)[:1500], 0
def compile_all(plans, procs=16, arch='sm_90'):
    ks = list({l.kernel for p in plans for l in p.launches})
    t=time.time(); res={}; bad=0
    with get_context('fork').Pool(procs) as pool:
        for k,c,r,s in pool.imap_unordered(comp, [(k,arch) for k in ks], chunksize=2):
            if c is None:
                bad+=1
                if bad<4: print('COMPILE FAIL', r)
            else: res[k]=(c,r,s)
    print(f'compiled {len(res)}/{len(ks)} in {time.time()-t:.1f}s', flush=True)
    return res
cuda = None
def init():
    global cuda
    cuda = ctypes.CDLL('libcuda.so.1')
    torch.cuda.init(); torch.zeros(1,device='cuda')
def ck(r):
    if r: raise RuntimeError(f'cuda {r}')
_f = {}
def fn(kernel, cubin):
    if kernel not in _f:
        m=ctypes.c_void_p(); f=ctypes.c_void_p()
        ck(cuda.cuModuleLoadData(ctypes.byref(m), cubin)); ck(cuda.cuModuleGetFunction(ctypes.byref(f), m, kernel.entry.encode()))
        _f[kernel]=f
    return _f[kernel]
class Runner:
    def __init__(s, plan, built, inputs):
        s.plan=plan; s.inputs=inputs
        o=plan.outputs[0]
        s.out=torch.empty(o.shape,dtype=inputs[0].dtype,device='cuda',memory_format=torch.channels_last if o.channels_last else torch.contiguous_format)
        s.calls=[]
        for l in plan.launches:
            f=fn(l.kernel, built[l.kernel][0])
            vals=[]
            for a in l.arguments:
                if a.kind==0: vals.append(ctypes.c_void_p(None if inputs[a.value] is None else inputs[a.value].data_ptr()))
                elif a.kind==1: vals.append(ctypes.c_void_p(s.out.data_ptr()))
                elif a.kind==3: vals.append(ctypes.c_int64(a.value))
            arr=(ctypes.c_void_p*len(vals))(*[ctypes.cast(ctypes.pointer(v),ctypes.c_void_p) for v in vals])
            s.calls.append((f,l.grid,l.block,l.shared_bytes,arr,vals))
            if l.shared_bytes>48*1024: ck(cuda.cuFuncSetAttribute(f,8,l.shared_bytes))
    def __call__(s):
        st=ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for f,g,b,sh,arr,_ in s.calls: ck(cuda.cuLaunchKernel(f,g,1,1,b,1,1,sh,st,arr,None))
        return s.out
def tensors(g, dtype, cl, wcl, bias, seed=0):
    gen=torch.Generator('cuda').manual_seed(seed)
    x=torch.randn(g.input_shape,device='cuda',generator=gen,dtype=torch.float32).to(dtype)
    w=(torch.randn(g.weight_shape,device='cuda',generator=gen)/ (g.in_channels_per_group*max(1,g.taps/(g.stride[0]*g.stride[1])))**.5).to(dtype)
    b=torch.randn(g.out_channels,device='cuda',generator=gen).to(dtype) if bias else None
    if cl: x=x.contiguous(memory_format=torch.channels_last)
    if wcl: w=w.contiguous(memory_format=torch.channels_last)
    return x,w,b
def ref(g,x,w,b,dt=torch.float64):
    return torch.nn.functional.conv_transpose2d(x.to(dt),w.to(dt),None if b is None else b.to(dt),g.stride,g.padding,g.output_padding,g.groups,g.dilation)
def err(out,r):
    if torch.isnan(out).any(): return float('nan')
    return float((out.double()-r).norm()/r.norm())
_flush=None
def time_all(fns, reps=15):
    global _flush
    if _flush is None: _flush=torch.empty(256<<20,dtype=torch.int8,device='cuda')
    for f in fns: f(); f()
    ev=[[(torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)) for _ in range(reps)] for _ in fns]
    for r in range(reps):
        for i,f in enumerate(fns):
            _flush.zero_()
            a,b=ev[i][r]; a.record(); f(); b.record()
        torch.cuda.synchronize()
    return [statistics.median(a.elapsed_time(b) for a,b in e) for e in ev]
def roof(g,dtype):
    es={torch.float32:4}.get(dtype,2)
    return g.elements*es/4.284e9
