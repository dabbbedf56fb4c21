import random, itertools
from layers import *
from tconv_swap import plan_narrow as pn
T = pn.Tile
def ceil(a,b): return -(-a//b)
def accs(g,t): return t.phases_h*t.phases_w*t.thread_rows*t.thread_columns*t.thread_channels
def unrolled(g,t):
    v,h = pn.axes(g)
    kh = g.kernel[0] if t.phases_h==g.stride[0] else v.taps
    kw = g.kernel[1] if t.phases_w==g.stride[1] else h.taps
    return kh*kw*t.thread_rows*t.thread_columns*t.thread_channels*t.unroll
def valid(g,t,cl,maxacc=100,maxun=3000):
    n = pn.threads(g,t)
    if n>512 or n<32: return False
    if pn.shared_bytes(g,t,cl)>48*1024: return False
    a=accs(g,t)
    if a>maxacc or a*n>45000: return False
    if unrolled(g,t)>maxun: return False
    if t.prefetch:
        c,r,w = pn.input_tile(g,t)
        if ceil(t.block_images*c*r*w,n)>16: return False
        if t.chunk>=g.in_channels_per_group: return False
    return True
def rnd(g,cl,rng):
    """any legal tile, for correctness"""
    for _ in range(10000):
        ph = rng.choice([1,g.stride[0]]); pw = rng.choice([1,g.stride[1]])
        if ph*pw>36: continue
        co=g.out_channels_per_group; cig=g.in_channels_per_group
        bg = 1
        tc = rng.choice([1,2,3,4,7,8])
        lc = rng.choice([1,1,2,4,8]); sc = rng.choice([1,1,2,3])
        chunk = rng.randint(1,min(cig,8))
        if g.groups>1 and rng.random()<.5:
            bg=rng.randint(1,min(g.groups,16))
            opts=[c for c in range(1,co+1) if co%c==0]; tc=rng.choice(opts)
            sl=co*bg//tc; ds=[d for d in range(1,sl+1) if sl%d==0]; lc=rng.choice(ds); sc=sl//lc
            if bg>1: chunk=cig
        t=T(ph,pw,rng.choice([1,1,2,3,4]),rng.choice([1,1,2,3,4]),tc,rng.random()<.5,lc,rng.choice([1,2,3,4,8,16,32]),sc,rng.choice([1,1,2,3,4]),rng.choice([1,1,2,3]),bg,chunk,rng.random()<.4,rng.choice([1,2]),1)
        if valid(g,t,cl,64,1500): return t
    return None
def options(g,cl):
    """sensible tiles"""
    sh,sw=g.stride; co=g.out_channels_per_group; cig=g.in_channels_per_group
    v,h=pn.axes(g)
    out=[]
    phs={1,sh} if sh<=4 else {1}
    pws={1,sw} if sw<=4 else {1}
    if cl:
        chans=[]
        if cig*co<=16 and g.groups>1:  # whole groups
            for tc in {co, 1}:
                for bg in {b for b in (g.groups, 64, 32, 16, 8) if b<=g.groups and g.groups%b==0}:
                    if bg*co//tc<=256: chans.append((tc, bg*co//tc, 1, bg))
        if not chans or co>=8:
            for tc in {min(co,8),min(co,4),min(co,16)}:
                n=ceil(co,tc)
                for lc in {n, ceil(n,2), 1}:
                    chans.append((tc,lc,1,1))
    else:
        chans=[]
        for tc in sorted({min(co,16),min(co,8),min(co,4), co if co<=8 else 8, 7 if co==21 else 8 if co>8 else co}):
            n=ceil(co,tc)
            for sc in {1,n,ceil(n,2)}:
                if sc<=4: chans.append((tc,1,sc,1))
    for ph in phs:
      for pw in pws:
        for R in (1,2,4,8):
          for P in (1,2,4,8,16):
            for adj in ((True,False) if P>1 else (True,)):
              if adj and P>4: continue
              for tc,lc,sc,bg in chans:
                a=ph*pw*R*P*tc
                if a>100 or a<4: continue
                per=sw//pw*lc*sc
                for lw in (1,2,4,8,16,32,64):
                  for lh in (1,2,4,8,16):
                    n=per*lw*lh
                    if n<64 or n>384: continue
                    if lw*P>=2*h.cells and lw>1: continue
                    if lh*R>=2*v.cells and lh>1: continue
                    eff=(h.cells/(ceil(h.cells,lw*P)*lw*P))*(v.cells/(ceil(v.cells,lh*R)*lh*R))*(co/(ceil(co,tc*lc*sc)*tc*lc*sc) if bg==1 else 1)
                    if eff<.75: continue
                    cks={cig} if (bg>1 or cig<=4) else {c for c in (4,8,16,cig) if c<=cig and (cig%c==0 or c==cig)}
                    if cig==21: cks={1,3,7,21}
                    for ck in cks:
                      for pf in ((False,True) if ck<cig else (False,)):
                        for un in (1,):
                          t=T(ph,pw,R,P,tc,adj,lc,lw,sc,lh,1,bg,ck,pf,un,1)
                          if valid(g,t,cl): out.append(t)
    return out
