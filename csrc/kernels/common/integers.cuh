// Integer arithmetic at compile time.
#pragma once

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
/// The largest power of two that divides n and is at most `limit`, itself a power of two.
constexpr int power_of_two_dividing(int n, int limit) {
  int power = limit;
  while (n % power) power /= 2;
  return power;
}
/// The smallest multiple of `multiple` with n >= from and n % modulus == rest.
constexpr int aligned_to(int from, int multiple, int modulus, int rest) {
  int n = round_up(from, multiple);
  while (n % modulus != rest) n += multiple;
  return n;
}
