from cc import *
d=dict(lanes_c=1,slices_c=1,block_images=1,block_groups=1,prefetch=False,unroll=1,min_blocks=1)
compile('dcgan5', T(phases_h=2,phases_w=2,thread_rows=4,thread_columns=2,thread_channels=3,adjacent=True,lanes_w=16,lanes_h=8,chunk=8,**d))
compile('dcgan5', T(phases_h=2,phases_w=2,thread_rows=4,thread_columns=2,thread_channels=3,adjacent=True,lanes_w=16,lanes_h=8,chunk=8,**(d|{'prefetch':True})))
compile('kb75', T(phases_h=1,phases_w=1,thread_rows=4,thread_columns=2,thread_channels=8,adjacent=False,lanes_w=32,lanes_h=1,chunk=8,**(d|{'slices_c':2})))
compile('kb81', T(phases_h=1,phases_w=1,thread_rows=4,thread_columns=2,thread_channels=8,adjacent=False,lanes_w=32,lanes_h=1,chunk=16,**(d|{'slices_c':2})))
compile('fcn32s', T(phases_h=1,phases_w=1,thread_rows=1,thread_columns=16,thread_channels=7,adjacent=False,lanes_w=1,lanes_h=4,chunk=3,**(d|{'slices_c':3})))
compile('fcn_up_dw', T(phases_h=1,phases_w=1,thread_rows=8,thread_columns=4,thread_channels=1,adjacent=False,lanes_w=16,lanes_h=1,chunk=1,**d))
compile('dw_k4s2', T(phases_h=2,phases_w=2,thread_rows=4,thread_columns=2,thread_channels=1,adjacent=True,lanes_w=32,lanes_h=4,chunk=1,**d))
