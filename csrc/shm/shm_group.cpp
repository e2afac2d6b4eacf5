// The memory of a group: taken over from the handshake, and mapped window by window.
#include "shm/shm_group.hpp"

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "shm/shm_handshake.hpp"

namespace fsdp2x::cpu {
namespace {

constexpr FileSizes kSizes = {size_t{1} << 36, size_t{1} << 46};

void check_window(uint64_t offset, size_t bytes, size_t arena_bytes, const char* arena) {
  if (offset % page_bytes() != 0 || bytes == 0 || bytes > arena_bytes || offset > arena_bytes - bytes) {
    throw Error(std::string("shared memory: no window of ") + std::to_string(bytes) + " bytes at " +
                std::to_string(offset) + " in the " + arena + " arena of " + std::to_string(arena_bytes) +
                " bytes. It must begin at a page and lie inside.");
  }
}

}  // namespace

ShmGroup::ShmGroup(const ShmOptions& options, const ShmMap& map, Mapping control_area)
    : ShmProtocol(options, map, control_area.data()), map_(map), control_area_(std::move(control_area)) {}

std::unique_ptr<ShmGroup> ShmGroup::create(const ShmOptions& options, std::string& reason) {
  std::unique_ptr<ShmGroup> group;
  const auto map_control = [&](Rendezvous& result) {
    const ShmMap map(options.world, result.total_bytes);
    Mapping control;
    try {
      control = Mapping(result.memory.get(), 0, map.control_bytes(), View::read_write);
    } catch (const Error& error) {
      throw Error("shared memory: " + options.name(options.rank) + " cannot enter its group: " + error.what());
    }
    for (size_t rank = 0; options.rank == 0 && rank < result.pids.size(); ++rank) {
      map.state(control.data(), static_cast<int>(rank)).pid.store(static_cast<uint64_t>(result.pids[rank]));
    }
    group.reset(new ShmGroup(options, map, std::move(control)));
  };
  std::optional<Rendezvous> result = rendezvous(options, kSizes, map_control, reason);
  if (!result) return nullptr;
  group->memory_ = std::move(result->memory);
  // In a separate pid namespace, a rank cannot interpret the published pids.
  if (result->pids_are_shared) group->watch_peers();
  return group;
}

ShmGroup::~ShmGroup() { close(); }

void ShmGroup::give_up(const std::string& why) {
  const std::string text = "shared memory: " + rank_name() + " cannot continue: " + why;
  fail(text);
  throw Error(text);
}

std::byte* ShmGroup::map(Windows& windows, size_t position, size_t bytes) {
  require_own_process();
  try {
    return windows.get(memory_.get(), position, bytes);
  } catch (const std::exception& error) {
    give_up(error.what());  // the others would wait for this rank, and it cannot come
  }
}

GatherWindow ShmGroup::gather_window(uint64_t offset, size_t bytes) {
  check_window(offset, bytes, map_.gather_bytes(), "gather");
  return {map(shared_, map_.gather_offset() + offset, bytes), isolated_window(offset, bytes)};
}

std::byte* ShmGroup::isolated_window(uint64_t offset, size_t bytes) {
  check_window(offset, bytes, map_.gather_bytes(), "gather");
  return map(isolated_, map_.gather_offset() + offset, bytes);
}

std::byte* ShmGroup::scratch_window(int owner_rank, uint64_t offset, size_t bytes) {
  if (owner_rank < 0 || owner_rank >= world()) {
    throw Error("shared memory: rank " + std::to_string(owner_rank) + " has no scratch in a world of " +
                std::to_string(world()));
  }
  check_window(offset, bytes, map_.scratch_bytes(), "scratch");
  return map(owner_rank == rank() ? own_scratch_ : peer_scratch_, map_.scratch_offset(owner_rank) + offset, bytes);
}

void ShmGroup::discard_private_pages(std::byte* isolated, size_t bytes) {
  require_own_process();
  drop(private_pages_.find(isolated, bytes));
}

void ShmGroup::drop(const std::vector<PageRun>& runs) {
  if (PrivatePages::drop(runs)) return;
  // The written pages would hide the next gather from this rank.
  give_up(std::string("it cannot drop pages that were written in place (") + std::strerror(errno) + ")");
}

std::shared_ptr<ShardViews> ShmGroup::shard_views(uint64_t offset, size_t bytes, std::vector<SlotRows> rows) {
  require_own_process();
  check_window(offset, bytes, map_.gather_bytes(), "gather");
  try {
    return std::make_shared<ShardViews>(memory_.get(), map_.gather_offset() + offset, bytes, std::move(rows));
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

void ShmGroup::publish(const ShardViews& views, const std::vector<PageRun>& runs) {
  require_own_process();
  views.publish(runs);
  drop(runs);
}

size_t ShmGroup::num_windows() const {
  return shared_.count() + isolated_.count() + own_scratch_.count() + peer_scratch_.count();
}

}  // namespace fsdp2x::cpu
