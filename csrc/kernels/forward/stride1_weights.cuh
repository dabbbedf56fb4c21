// How the packed weights of forward/stride1.cu lie: for each tile of TILE_CHANNELS output channels, by parts of one column of
// taps b and CHUNK_BYTES of input channels, [a][output channel][those], swizzled as a box of the copy engine would be.
#pragma once

#include "common/integers.cuh"

constexpr int ITEM = static_cast<int>(sizeof(Element));
/// Input channels of a part.
constexpr int CHUNK = CHUNK_BYTES / ITEM;
constexpr int K_CHANNELS = round_up(IN_CHANNELS, CHUNK), CHANNEL_TILES = ceil_div(OUT_CHANNELS, TILE_CHANNELS);
/// Rows of taps in a part; STACKED: each twice but one.
constexpr int STACK = STACKED ? 2 * KERNEL_H - 1 : KERNEL_H;
constexpr int CHANNEL_ROWS_BYTES = TILE_CHANNELS * CHUNK_BYTES;
constexpr int PART_BYTES = STACK * CHANNEL_ROWS_BYTES;
constexpr int WEIGHT_BYTES = KERNEL_W * (K_CHANNELS / CHUNK) * PART_BYTES;
static_assert((CHUNK_BYTES == 64 || CHUNK_BYTES == 128) && CHANNEL_ROWS_BYTES % 1024 == 0);

/// Where the 16 bytes of a row lie whose number is `piece`.
__device__ constexpr int swizzled(int piece, int row) { return CHUNK_BYTES == 128 ? piece ^ row % 8 : piece ^ row / 2 % 4; }

/// The a of a part's place in the stack.
__device__ constexpr int stacked_row(int place) { return STACKED ? (2 * KERNEL_H - place) % KERNEL_H : place; }
