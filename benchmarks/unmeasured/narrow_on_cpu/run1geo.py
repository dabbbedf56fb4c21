from layers import *
def rgeo(rng):
    while True:
        gr=rng.choice([1,1,1,2,3,4,8]); ci=gr*rng.randint(1,10); co=gr*rng.randint(1,10)
        if rng.random()<.3: gr=ci=rng.randint(2,40); co=gr*rng.choice([1,1,2])
        k=(rng.randint(1,7),rng.randint(1,7)); s=(rng.randint(1,5),rng.randint(1,5)); d=(rng.choice([1,1,2,3]),rng.choice([1,1,2,3]))
        if rng.random()<.2: s=(rng.choice([6,8,16]),rng.choice([6,8,9,16])); k=(2*s[0],2*s[1]); d=(1,1)
        p=(rng.randint(0,4),rng.randint(0,4)); op=(rng.randint(0,max(s[0],d[0])-1),rng.randint(0,max(s[1],d[1])-1))
        g=G(rng.randint(1,5),ci,rng.randint(1,40),rng.randint(1,70),co,k,s,p,op,d,gr)
        if g.out_height>0 and g.out_width>0: return g
