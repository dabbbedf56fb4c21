import sys, re, time, os
sys.path.insert(0, '/work/main')
os.environ.setdefault('OMP_NUM_THREADS','1')
import torch
from tconv_swap.geometry import Geometry
from tconv_swap import plan_narrow as pn, jit
G = Geometry
L = {
 'kb75': G(16,32,128,256,64,(3,5),(2,3),(1,2),(0,0),(2,1),4),
 'kb81': G(16,32,64,128,64,(3,3),(5,5),(1,1),(0,0),(2,2),1),
 'dcgan5': G(128,64,32,32,3,(4,4),(2,2),(1,1)),
 'fcn32s': G(2,21,16,16,21,(64,64),(32,32),(16,16)),
 'fcn_up_dw': G(2,21,64,64,21,(16,16),(8,8),(4,4),groups=21),
 'dw_k4s2': G(8,64,128,128,64,(4,4),(2,2),(1,1),groups=64),
 'dw_k2s2': G(8,64,128,128,64,(2,2),(2,2),groups=64),
 'rgb_k7': G(8,64,256,256,3,(7,7),(1,1),(3,3)),
 'mono_k4s2': G(8,32,256,256,1,(4,4),(2,2),(1,1)),
 'seg_k2s2': G(8,64,256,256,2,(2,2),(2,2)),
 'dw_k3s2': G(8,128,64,64,128,(3,3),(2,2),(1,1),(1,1),groups=128),
}
T = pn.Tile
def compile(name, tile, dtype=torch.float32, cl=False, arch='sm_90', bias=True, keep=None):
    g = L[name]
    p = pn.build(g, dtype, cl, False, bias, tile, '')
    k = p.launches[0].kernel
    t=time.time()
    cubin, log = jit.compile_with_log(k, arch)
    m = re.search(r'Used (\d+) registers', log); s = re.search(r'(\d+) bytes spill stores', log); sm = re.search(r'(\d+) bytes smem', log)
    print(f"{name:10s} {str(dtype)[6:]:8s} {'CL' if cl else '  '} regs {m and m.group(1)} spill {s and s.group(1)} smem {sm and sm.group(1)} (calc {pn.shared_bytes(g,tile,cl)}) grid {p.launches[0].grid} block {p.launches[0].block} cubin {len(cubin)} {time.time()-t:.2f}s", flush=True)
    if keep: open(keep,'wb').write(cubin)
    return p, cubin
