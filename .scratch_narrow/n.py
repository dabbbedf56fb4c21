from cand import *
for n,g in L.items():
    print(n, len(options(g,False)), len(options(g,True)))
