// Counts the tiles of scores that each_visible_tile() visits for random windows, offsets and lengths: each tile in
// which some query sees some key once, and no other. Prints the first problem where it is not so.
#include <cstdio>
#include <map>
#include <random>

#include "cpu/tiles/mask.inl"

namespace attn::ATTN_ISA {
namespace {

struct State {
  RowTile rows;
};
using Counts = std::map<std::pair<int64_t, int64_t>, int>;  // of tiles, by their first row and first key

void count(const RowParams& p, Counts& visits, Counts& loads) {
  std::vector<State> states(static_cast<size_t>(divide_up(p.rows_per_task, kRowTile)));
  for (int64_t task = 0; task < p.tasks(); ++task) {
    const RowTask own(p, task);
    const RowTiles<State> rows(p, own, states.data(), [](State&) {});
    const auto load = [&](Range keys) { ++loads[{own.rows.first, keys.first}]; };
    each_visible_tile<float>(p, rows, own.keys_seen(p, rows.positions), nullptr, load,
                             [&](const State& state, const ScoreTile<float>& tile) {
                               ++visits[{state.rows.positions.first, tile.keys.first}];
                             });
  }
}

// Counts by the definition of the options, pair by pair; `rows`: of a tile.
Counts expected(const RowParams& p, int64_t rows) {
  Counts tiles;
  const auto [left, right, offset, length, _] = p.visibility;
  for (int64_t i = 0; i < p.queries; ++i)
    for (int64_t j = 0; j < *length; ++j) {
      const int64_t at = i + *offset;
      if ((left < 0 || j >= at - left) && (right < 0 || j <= at + right))
        tiles[{i / rows * rows, j / kKeyTile * kKeyTile}] = 1;
    }
  return tiles;
}

bool check(std::mt19937& random) {
  const auto from = [&](int64_t first, int64_t last) { return std::uniform_int_distribution(first, last)(random); };
  RowParams p;
  p.queries = from(1, 300);
  p.keys = from(1, 700);
  const int64_t offset = from(-200, 600), length = from(0, p.keys);
  p.visibility = {from(0, 2) ? from(0, 200) : -1, from(0, 2) ? from(0, 100) : -1, &offset, &length, nullptr};
  p.rows_per_task = kRowTile * from(1, 3);
  p.keys_per_split = kKeyTile * from(1, 4);
  const int64_t most = most_keys(p, smaller(p.rows_per_task, p.queries)) + kKeyTile;  // begun within a tile
  p.splits = from(0, 1) ? divide_up(most, p.keys_per_split) : 1;
  Counts visits, loads;
  count(p, visits, loads);
  if (visits == expected(p, kRowTile) && loads == expected(p, p.rows_per_task)) return true;
  std::printf("L %ld, S %ld, window %ld %ld, offset %ld, length %ld, %ld rows a task, %ld splits of %ld keys\n",
              p.queries, p.keys, p.visibility.left, p.visibility.right, offset, length, p.rows_per_task, p.splits,
              p.keys_per_split);
  return false;
}

}  // namespace
}  // namespace attn::ATTN_ISA

int main() {
  std::mt19937 random(1);
  for (int n = 0; n < 1000; ++n)
    if (!attn::ATTN_ISA::check(random)) return 1;
  std::puts("right");
}
