// How the threads of a block divide the copies of one chunk of k, COPIED_ROWS x COPIED_COLS pixels of each image of the tile.
// NCHW: a copy is COPY neighbouring pixels (with all words of k, which SLOT_THREADS threads share); channels_last: COPY
// channels of a pixel.
#pragma once

constexpr int COPIES_PER_PIXEL = INPUT_CHANNELS_LAST ? CHUNK_WORDS * CHANNELS_PER_WORD / COPY : 1;
constexpr int COPIES_PER_ROW = COPIED_COLS / COPY_PIXELS * COPIES_PER_PIXEL;
constexpr int COPIES = TILE_N * COPIED_ROWS * COPIES_PER_ROW;
__device__ constexpr int slot_threads() {
  int n = 1;
  while (!INPUT_CHANNELS_LAST && n < CHUNK_WORDS && 2 * n * COPIES <= THREADS) n *= 2;
  return n;
}
constexpr int SLOT_THREADS = slot_threads();
constexpr int SLOTS = ceil_div(COPIES, THREADS / SLOT_THREADS);
constexpr int K_PER_SLOT = INPUT_CHANNELS_LAST ? 1 : CHUNK_WORDS / SLOT_THREADS;
/// Registers that hold COPY pixels of one channel.
constexpr int SLOT_WORDS = ceil_div(COPY, 2);
