// Gradient of the weight with pixels along k (grad_weight/pixel_rows.cu): which of its entries a tile holds.
//
// One side of a tile are input channels of a group; the other are chunks of CHUNK output channels, each of one tap.
#pragma once

#include "common/integers.cuh"

constexpr int CI_GROUP = IN_CHANNELS / GROUPS;
constexpr int CO_GROUP = OUT_CHANNELS / GROUPS;
constexpr int TAPS = KERNEL_H * KERNEL_W;

constexpr int TILE_ROWS = 128;
constexpr int INPUT_SIDE = SWAPPED ? TILE_COLS : TILE_ROWS;
constexpr int OUTPUT_SIDE = SWAPPED ? TILE_ROWS : TILE_COLS;
constexpr int TILE_CHUNKS = OUTPUT_SIDE / CHUNK;
constexpr int CHANNEL_CHUNKS = ceil_div(CO_GROUP, CHUNK);
constexpr int INPUT_TILES = ceil_div(CI_GROUP, INPUT_SIDE);
constexpr int OUTPUT_TILES = ceil_div(TAPS * CHANNEL_CHUNKS, TILE_CHUNKS);
static_assert(OUTPUT_SIDE % CHUNK == 0);

/// The operand that two blocks of a cluster load for each other: none, the input (for tiles of the same input channels),
/// or grad_output (for tiles of the same output channels).
constexpr int NONE = 0, INPUT = 1, OUTPUT = 2;
constexpr int CLUSTER = MULTICAST == NONE ? 1 : 2;
static_assert(MULTICAST == NONE || (MULTICAST == INPUT ? OUTPUT_TILES : INPUT_TILES) % CLUSTER == 0);

/// Which tile and split a block computes. Blocks of a cluster are neighbours.
struct Place {
  int ci;           // first input channel, in the group
  int first_chunk;  // in the group, counted [tap][channels]
  int group, split;

  __device__ __forceinline__ explicit Place(int block) {
    int tile = block % (INPUT_TILES * OUTPUT_TILES);
    const int rest = block / (INPUT_TILES * OUTPUT_TILES);
    const int along_input = MULTICAST == INPUT ? tile / OUTPUT_TILES : tile % INPUT_TILES;
    const int along_output = MULTICAST == INPUT ? tile % OUTPUT_TILES : tile / INPUT_TILES;
    ci = along_input * INPUT_SIDE;
    first_chunk = along_output * TILE_CHUNKS;
    group = rest % GROUPS;
    split = rest / GROUPS;
  }
};
