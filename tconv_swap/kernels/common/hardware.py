"""Facts of NVIDIA's GPUs that planners use, from the CUDA C++ Programming Guide (technical specifications of compute
capabilities) and the CUDA driver API (cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col)."""

from __future__ import annotations

#: Registers of a multiprocessor, and the most of a thread.
REGISTERS, MAX_REGISTERS = 65536, 255
#: The most threads that a multiprocessor of compute capability 8.0 or 9.0 runs at a time.
RESIDENT_THREADS = 2048
#: Bytes of shared memory that the system reserves in each block.
RESERVED_BYTES = 1024
#: Bytes of a sector of the L2, the least that a read moves.
SECTOR_BYTES = 32
#: The most elements of a box of a tensor map along a dimension, and the largest traversal step.
MAX_BOX, MAX_STEP = 256, 8
#: In im2col mode, the most pixels of a copy, and the corners, which are numbers from -MAX_CORNER to MAX_CORNER - 1.
MAX_PIXELS, MAX_CORNER = 1024, 128
#: The number of bytes of which the strides of a tensor map are multiples.
TMA_ALIGNMENT = 16
