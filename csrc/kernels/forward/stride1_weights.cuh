// The layout of the packed weights of forward/stride1.cu: for each tile of TILE_CHANNELS output channels, parts of one column
// of taps b and CHUNK_BYTES of input channels. A part is [row of taps a][output channel][input channels], with the swizzle of
// a box of the copy engine.
#pragma once

#include "common/integers.cuh"

constexpr int ITEM = static_cast<int>(sizeof(Element));
/// Input channels of a part.
constexpr int CHUNK = CHUNK_BYTES / ITEM;
constexpr int K_CHANNELS = round_up(IN_CHANNELS, CHUNK), CHANNEL_TILES = ceil_div(OUT_CHANNELS, TILE_CHANNELS);
/// Rows of taps in a part. With STACKED each row but one appears twice.
constexpr int STACK = STACKED ? 2 * KERNEL_H - 1 : KERNEL_H;
constexpr int CHANNEL_ROWS_BYTES = TILE_CHANNELS * CHUNK_BYTES;
constexpr int PART_BYTES = STACK * CHANNEL_ROWS_BYTES;
constexpr int WEIGHT_BYTES = KERNEL_W * (K_CHANNELS / CHUNK) * PART_BYTES;
static_assert((CHUNK_BYTES == 64 || CHUNK_BYTES == 128) && CHANNEL_ROWS_BYTES % 1024 == 0);

/// The index in its row, in units of 16 bytes, at which piece `piece` lies.
__device__ constexpr int swizzled(int piece, int row) { return CHUNK_BYTES == 128 ? piece ^ row % 8 : piece ^ row / 2 % 4; }

/// The row of taps at a place of a part.
__device__ constexpr int stacked_row(int place) { return STACKED ? (2 * KERNEL_H - place) % KERNEL_H : place; }
