// Handshake messages that no rank would send. Strangers at the socket are rejected and change nothing, and a wrong host
// is detected. FSDP2X_FULL=1 runs ten times as many rounds.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "ranks.hpp"
#include "shm/file_descriptor.hpp"
#include "shm/shm_group.hpp"
#include "shm/shm_map.hpp"

namespace fsdp2x {
namespace {

using cpu::FileDescriptor;
using cpu::ShmGroup;
using cpu::ShmOptions;
using ranks::require;
using Random = std::mt19937;

unsigned num_rounds() { return std::getenv("FSDP2X_FULL") != nullptr ? 300 : 30; }

size_t below(Random& random, size_t end) { return random() % end; }

// The messages as sent: integers in the machine's byte order, without pads.
template <class... Fields>
std::string packed(const Fields&... fields) {
  std::string bytes;
  const auto add = [&](const auto& field) { bytes.append(reinterpret_cast<const char*>(&field), sizeof(field)); };
  (add(fields), ...);
  return bytes;
}
std::string hello_of(const ShmOptions& options, int64_t pid) {
  return packed(cpu::kShmMagic, static_cast<int32_t>(options.rank), static_cast<int32_t>(options.world), pid) +
         options.token;
}
std::string reply_of(uint64_t total_bytes, int64_t pid) { return packed(cpu::kShmMagic, total_bytes, pid); }

sockaddr_un address_of(const ShmOptions& options, socklen_t& length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  options.socket_name.copy(address.sun_path + 1, options.socket_name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + options.socket_name.size());
  return address;
}

FileDescriptor connected(const ShmOptions& options) {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_un address = address_of(options, length);
  require(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0, "rank 0 listens");
  return fd;
}

void send_with(const FileDescriptor& to, std::string bytes, const std::vector<int>& files) {
  iovec data = {bytes.data(), bytes.size()};
  std::vector<char> control(CMSG_SPACE(files.size() * sizeof(int)));
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!files.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), files.data(), files.size() * sizeof(int));
  }
  // An empty message of a stranger that was already rejected is no fault of the test.
  ::sendmsg(to.get(), &message, MSG_NOSIGNAL);
}

std::string random_bytes(Random& random, size_t num) {
  std::string bytes(num, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Returns `bytes` with one change, or none.
std::string changed(Random& random, const std::string& bytes) {
  std::string found = bytes;
  switch (below(random, 6)) {
    case 0:
      return random_bytes(random, below(random, 300));
    case 1:
      return found.substr(0, below(random, found.size()));
    case 2:
      return found + random_bytes(random, 1 + below(random, 5000));
    case 3:
      return found + found;
    case 4:
      for (size_t i = 0; i <= below(random, 4); ++i) found[below(random, found.size())] ^= static_cast<char>(random());
      return found;
    default: {
      const size_t at = below(random, found.size() / 4) * 4;
      const int32_t value = std::array<int32_t, 6>{0, 1, -1, 1 << 30, INT32_MIN, 2}[below(random, 6)];
      return found.replace(at, sizeof(value), packed(value));
    }
  }
}

size_t num_open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

// Rank 1 brings strangers, some before it greets and some after. They do not know the token.
void with_strangers(const ShmOptions& options, unsigned seed) {
  const size_t files_before = num_open_files();
  std::vector<FileDescriptor> strangers;
  ShmOptions mine = options;
  int num_exchanges = 0;
  Random random(seed);
  const auto bring = [&] {
    for (size_t i = below(random, seed % 10 == 0 ? 100 : 8); i > 0; --i) {
      ShmOptions lie = options;
      lie.rank = static_cast<int>(below(random, 5));
      lie.token[below(random, lie.token.size())] ^= static_cast<char>(1 + below(random, 255));
      FileDescriptor stranger = connected(options);
      const bool is_silent = below(random, 5) == 0;
      const std::vector<int> files(below(random, 3), 0);
      for (size_t num = is_silent ? 0 : 1 + below(random, 2); num > 0; --num) {
        send_with(stranger, changed(random, hello_of(lie, ::getpid())), files);
      }
      if (below(random, 2) == 0) strangers.push_back(std::move(stranger));
    }
  };
  mine.exchange = [&](const std::string& text) {
    ++num_exchanges;
    if (options.rank == 1 && num_exchanges == 2)
      bring();  // this rank has greeted, and rank 0 has not read the
                // greeting
    auto said = options.exchange(text);
    if (options.rank == 1 && num_exchanges == 1) bring();
    return said;
  };
  {
    const auto group = ranks::enter(mine);
    const auto window = group->gather_window(0, 1);
    if (options.rank == 1) window.shared[0] = std::byte{9};
    ranks::meet_all(options);
    require(window.isolated[0] == std::byte{9}, "the ranks share memory");
    ranks::meet_all(options);
  }
  strangers.clear();
  require(num_open_files() == files_before, "all descriptors are closed");
}

TEST(ShmWire, StrangersChangeNothing) {
  for (unsigned seed = 0; seed < num_rounds() && !HasFailure(); ++seed) {
    SCOPED_TRACE("round " + std::to_string(seed));
    ranks::expect_all_ok(ranks::run(ranks::fresh_options(2 + static_cast<int>(seed % 2)),
                                    [&](const ShmOptions& options) { with_strangers(options, seed); }));
  }
}

// A peer that knows the token may take a rank's place. Then all ranks report the same error, or continue.
TEST(ShmWire, InsidersFailAllRanksAlike) {
  size_t num_failed = 0;
  for (unsigned seed = 0; seed < num_rounds() && !HasFailure(); ++seed) {
    SCOPED_TRACE("round " + std::to_string(seed));
    const auto outcomes = ranks::run(ranks::fresh_options(3), [&](const ShmOptions& options) {
      Random random(seed);
      const size_t files_before = num_open_files();
      std::vector<FileDescriptor> insiders;
      ShmOptions mine = options;
      int num_exchanges = 0;
      mine.exchange = [&](const std::string& text) {
        auto said = options.exchange(text);
        for (size_t i = below(random, 4); options.rank == 1 && num_exchanges == 0 && i > 0; --i) {
          ShmOptions lie = options;
          lie.rank = static_cast<int>(below(random, 4));
          insiders.push_back(connected(options));
          const std::string hello = hello_of(lie, ::getpid());
          send_with(insiders.back(), below(random, 4) == 0 ? hello : changed(random, hello), {});
        }
        ++num_exchanges;
        return said;
      };
      std::string reason;
      auto group = ShmGroup::create(mine, reason);
      group.reset();
      insiders.clear();
      require(num_open_files() == files_before, "all descriptors are closed");
      if (!reason.empty()) throw Error(reason);
    });
    for (const ranks::Outcome& outcome : outcomes) {
      EXPECT_TRUE(outcome.exit_code == 0 || outcome.exit_code == 1) << outcome.exit_code;
      EXPECT_EQ(outcome.message, outcomes[0].message);
      EXPECT_EQ(outcome.message.find("not true"), std::string::npos) << outcome.message;
      EXPECT_LT(outcome.seconds, 8.0);
    }
    num_failed += outcomes[0].ok ? 0 : 1;
  }
  EXPECT_GT(num_failed, 0u);
  EXPECT_LT(num_failed, num_rounds());
}

// Plays rank 0 up to its reply, which `send` sends.
void play_host(const ShmOptions& options, const std::function<void(const FileDescriptor&)>& send) {
  FileDescriptor listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_un address = address_of(options, length);
  require(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0, "bind");
  require(::listen(listener.get(), 5) == 0, "listen");
  options.exchange("");  // open
  options.exchange("");  // come
  const FileDescriptor guest(::accept(listener.get(), nullptr, nullptr));
  std::array<char, 4096> hello;
  const ssize_t num = ::recv(guest.get(), hello.data(), hello.size(), 0);
  ShmOptions theirs = options;
  theirs.rank = 1;
  ucred peer = {};
  socklen_t size = sizeof(peer);
  require(::getsockopt(guest.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0, "who is there");
  require(num > 0 && std::string(hello.data(), static_cast<size_t>(num)) == hello_of(theirs, peer.pid),
          "a greeting is what it says and nothing else");
  send(guest);
  options.exchange("");  // serve
  options.exchange("");  // take
}

FileDescriptor memory_of(size_t bytes, int seals) {
  FileDescriptor memory(::memfd_create("fsdp2x", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  require(::ftruncate(memory.get(), static_cast<off_t>(bytes)) == 0, "ftruncate");
  require(::fcntl(memory.get(), F_ADD_SEALS, seals) == 0, "seals");
  return memory;
}

constexpr size_t kMemoryBytes = size_t{1} << 36;

TEST(ShmWire, AWrongHostIsTold) {
  size_t num_right = 0;
  for (unsigned seed = 0; seed < num_rounds() && !HasFailure(); ++seed) {
    SCOPED_TRACE("round " + std::to_string(seed));
    Random random(seed);
    const bool is_right = below(random, 5) == 0;
    const auto outcomes = ranks::run(ranks::fresh_options(2), [&](const ShmOptions& options) {
      if (options.rank == 0) {
        play_host(options, [&](const FileDescriptor& guest) {
          constexpr int kBoth = F_SEAL_SHRINK | F_SEAL_GROW;
          const std::string reply = reply_of(kMemoryBytes, ::getpid());
          const FileDescriptor right = memory_of(kMemoryBytes, kBoth);
          if (is_right) return send_with(guest, reply, {right.get()});
          const FileDescriptor unsealed = memory_of(kMemoryBytes, below(random, 2) == 0 ? F_SEAL_GROW : F_SEAL_SHRINK);
          const FileDescriptor small = memory_of(4096, kBoth);
          const FileDescriptor null(::open("/dev/null", O_RDWR | O_CLOEXEC));
          switch (below(random, 7)) {
            case 0:
              return;  // says nothing
            case 1:
              return send_with(guest, reply, {});
            case 2:
              return send_with(guest, reply, std::vector<int>(2 + below(random, 30), right.get()));
            case 3:
              return send_with(guest, reply, {unsealed.get()});
            case 4:
              return send_with(guest, reply, {below(random, 2) == 0 ? null.get() : guest.get()});
            case 5:
              return send_with(guest, reply_of(4096, ::getpid()), {small.get()});
            default: {
              std::string wrong = reply;
              while (wrong.substr(0, 16) == reply.substr(0, 16) && wrong.size() == reply.size()) {
                wrong = changed(random, reply);
              }
              return send_with(guest, wrong, {right.get()});
            }
          }
        });
        return;
      }
      const size_t files_before = num_open_files();
      std::string reason;
      auto group = ShmGroup::create(options, reason);
      if (group) group->gather_window(0, 1).shared[0] = std::byte{1};
      require((group != nullptr) == is_right, "a file of the right host, and no other, is taken: " + reason);
      group.reset();
      require(num_open_files() == files_before, "all descriptors are closed");
      require(is_right || reason.find("rank 1 ") != std::string::npos, "who was deceived: " + reason);
    });
    ranks::expect_all_ok(outcomes);
    num_right += is_right ? 1 : 0;
  }
  EXPECT_GT(num_right, 0u);
}

// The reply contains no bytes of the host's stack, and no descriptor except the memory's.
TEST(ShmWire, AReplyIsWhatItSays) {
  ranks::expect_all_ok(ranks::run(ranks::fresh_options(2), [](const ShmOptions& options) {
    if (options.rank == 0) {
      std::string reason;
      const auto group = ShmGroup::create(options, reason);
      require(group != nullptr, reason);
      return;
    }
    options.exchange("");
    const FileDescriptor connection = connected(options);
    send_with(connection, hello_of(options, ::getpid()), {});
    options.exchange("");
    options.exchange("");
    std::array<char, 4096> bytes;
    alignas(cmsghdr) std::array<char, 4096> control = {};
    iovec data = {bytes.data(), bytes.size()};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t num = ::recvmsg(connection.get(), &message, 0);
    require(num == static_cast<ssize_t>(reply_of(0, 0).size()), "its size");
    uint64_t total_bytes = 0;
    std::memcpy(&total_bytes, bytes.data() + sizeof(cpu::kShmMagic), sizeof(total_bytes));
    ucred peer = {};
    socklen_t size = sizeof(peer);
    require(::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0, "who is there");
    require(std::string(bytes.data(), static_cast<size_t>(num)) == reply_of(total_bytes, peer.pid), "its bytes");
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    require(header != nullptr && header->cmsg_len == CMSG_LEN(sizeof(int)), "one descriptor");
    require(CMSG_NXTHDR(&message, const_cast<cmsghdr*>(header)) == nullptr, "and no more");
    options.exchange("");
  }));
}

}  // namespace
}  // namespace fsdp2x
