// The meeting of the ranks: memfd, abstract unix socket, and the checks of who is at the other end.
//
//   peer   connect (again and again until rank 0 listens) -> check the listener's user -> Hello {rank, token ..}
//   rank 0 accept -> check the peer's user, token, version, world, rank -> keep the connection
//          when all are there: Reply {ok, total bytes} + the descriptor of the memfd
#include "cpu/shm_handshake.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <thread>

#include "core/error.hpp"
#include "cpu/shm_map.hpp"
#include "cpu/shm_peers.hpp"

namespace fsdp2x::cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kTokenBytes = 32;
constexpr size_t kMinTotalBytes = size_t{1} << 36;
constexpr size_t kMaxTotalBytes = size_t{1} << 46;
constexpr auto kSlice = std::chrono::milliseconds(50);

enum class Verdict : uint32_t { ok, wrong_token, wrong_version, wrong_world, wrong_rank };

struct Hello {
  uint64_t magic = kShmMagic;
  int32_t rank = 0;
  int32_t world = 0;
  int64_t pid = 0;
  char token[kTokenBytes] = {};
};

struct Reply {
  uint64_t magic = kShmMagic;
  Verdict verdict = Verdict::ok;
  uint64_t total_bytes = 0;
  int64_t pid = 0;  // rank 0's own idea of its pid
};

const char* reason(Verdict verdict) {
  switch (verdict) {
    case Verdict::ok:
      return "accepted";
    case Verdict::wrong_token:
      return "it showed a wrong token: it belongs to another job or was given another group's address";
    case Verdict::wrong_version:
      return "it runs another version of fsdp2x: install the same one for all ranks";
    case Verdict::wrong_world:
      return "it counts another number of ranks: start all ranks with the same process group";
    case Verdict::wrong_rank:
      return "its rank is not one that is still missing: two processes have the same rank";
  }
  return "unknown";
}

[[noreturn]] void fail(const ShmOptions& options, const std::string& what) {
  throw Error("shared memory: rank " + std::to_string(options.rank) + " of " + std::to_string(options.world) + " " +
              what);
}

std::string system_error() { return std::string(" (") + std::strerror(errno) + ")"; }

sockaddr_un address_of(const ShmOptions& options, socklen_t& length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, options.socket_name.data(), options.socket_name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + options.socket_name.size());
  return address;
}

// False when `deadline` passed first.
bool wait_readable(int fd, const ShmOptions& options, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd item = {fd, POLLIN, 0};
    const auto slice = std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(0), kSlice);
    if (::poll(&item, 1, static_cast<int>(slice.count())) > 0) return true;
    if (left.count() <= 0) return false;
    if (options.on_wait) options.on_wait();
  }
}

ucred peer_of(int fd, const ShmOptions& options) {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    fail(options, "cannot see who is at the other end of its socket" + system_error());
  }
  return credentials;
}

FileDescriptor make_socket(const ShmOptions& options) {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) fail(options, "cannot make a unix socket" + system_error());
  return fd;
}

FileDescriptor make_memory(const ShmOptions& options, size_t& total_bytes) {
  FileDescriptor memory(::memfd_create("fsdp2x", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) fail(options, "cannot make a memfd" + system_error());
  rlimit limit = {};
  ::getrlimit(RLIMIT_FSIZE, &limit);  // going beyond it is answered with a signal
  for (total_bytes = kMaxTotalBytes; total_bytes >= kMinTotalBytes; total_bytes /= 4) {
    if (limit.rlim_cur != RLIM_INFINITY && total_bytes > limit.rlim_cur) continue;
    if (::ftruncate(memory.get(), static_cast<off_t>(total_bytes)) == 0) break;
  }
  if (total_bytes < kMinTotalBytes) {
    fail(options, "cannot make a sparse memfd of " + std::to_string(kMinTotalBytes) +
                      " bytes (only what is written takes memory): check `ulimit -f`");
  }
  // Nobody may shrink it under the others' mappings.
  if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    fail(options, "cannot seal its memfd" + system_error());
  }
  return memory;
}

bool same_token(const ShmOptions& options, const Hello& hello) {
  unsigned difference = 0;
  for (size_t i = 0; i < kTokenBytes; ++i) {
    difference |= static_cast<unsigned char>(options.token[i]) ^ static_cast<unsigned char>(hello.token[i]);
  }
  return difference == 0;
}

Verdict judge(const ShmOptions& options, const Hello& hello, const std::vector<FileDescriptor>& sockets) {
  if (hello.magic != kShmMagic) return Verdict::wrong_version;
  if (!same_token(options, hello)) return Verdict::wrong_token;
  if (hello.world != options.world) return Verdict::wrong_world;
  const bool missing =
      hello.rank >= 1 && hello.rank < options.world && !sockets[static_cast<size_t>(hello.rank)].valid();
  return missing ? Verdict::ok : Verdict::wrong_rank;
}

std::string missing_ranks(const std::vector<FileDescriptor>& sockets) {
  std::string text;
  for (size_t rank = 1; rank < sockets.size(); ++rank) {
    if (!sockets[rank].valid()) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

void send_verdict(int fd, Verdict verdict) {
  Reply reply;
  reply.verdict = verdict;
  ::send(fd, &reply, sizeof(reply), MSG_NOSIGNAL);  // it is refused either way
}

Meeting meet_as_rank_0(const ShmOptions& options, Deadline deadline) {
  Meeting meeting;
  meeting.memory = make_memory(options, meeting.total_bytes);
  meeting.pids.assign(static_cast<size_t>(options.world), 0);
  meeting.pids[0] = ::getpid();
  meeting.sockets.resize(static_cast<size_t>(options.world));
  if (options.world == 1) return meeting;

  const FileDescriptor listener = make_socket(options);
  socklen_t length = 0;
  const sockaddr_un address = address_of(options, length);
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener.get(), options.world + 16) != 0) {
    fail(options, "cannot listen on its unix socket" + system_error());
  }
  std::string strangers;
  for (int num_missing = options.world - 1; num_missing > 0;) {
    if (!wait_readable(listener.get(), options, deadline)) {
      fail(options, "waited " + seconds_text(options.timeout_s) + " for rank " + missing_ranks(meeting.sockets) +
                        " to join: it failed earlier, did not start, or runs on another host" + strangers);
    }
    FileDescriptor connection(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid()) continue;  // the peer went away again
    const ucred peer = peer_of(connection.get(), options);
    if (peer.uid != ::geteuid()) {
      // Anybody may connect to an abstract socket; that must not end the job.
      strangers = "; a process of another user (uid " + std::to_string(peer.uid) + ", not " +
                  std::to_string(::geteuid()) + ") was refused";
      continue;
    }
    Hello hello;
    if (!wait_readable(connection.get(), options, deadline)) {
      fail(options, "has a connection from process " + std::to_string(peer.pid) + ", which said nothing");
    }
    const ssize_t received = ::recv(connection.get(), &hello, sizeof(hello), 0);
    if (received <= 0) continue;  // the peer went away again
    if (received != static_cast<ssize_t>(sizeof(hello))) hello.magic = 0;
    const Verdict verdict = judge(options, hello, meeting.sockets);
    if (verdict != Verdict::ok) {
      send_verdict(connection.get(), verdict);
      fail(options, "refused process " + std::to_string(peer.pid) + ", which calls itself rank " +
                        std::to_string(hello.rank) + ": " + reason(verdict));
    }
    const auto rank = static_cast<size_t>(hello.rank);
    meeting.pids[rank] = peer.pid == hello.pid ? peer.pid : 0;
    meeting.sockets[rank] = std::move(connection);
    --num_missing;
  }
  return meeting;
}

FileDescriptor connect_to_rank_0(const ShmOptions& options, Deadline deadline) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(options, length);
  auto pause = std::chrono::milliseconds(1);
  while (true) {
    FileDescriptor connection = make_socket(options);
    if (::connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) return connection;
    if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
      fail(options, "cannot connect to rank 0" + system_error());
    }
    if (Clock::now() >= deadline) {
      fail(options, "waited " + seconds_text(options.timeout_s) +
                        " for rank 0 to listen: it failed earlier, did not start, or runs on another host");
    }
    if (options.on_wait) options.on_wait();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(20));
  }
}

// The reply of rank 0 and the descriptor that came with it, if one did.
std::optional<Reply> receive_reply(int socket, FileDescriptor& memory) {
  Reply reply;
  iovec data = {&reply, sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (received >= 0 && header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    memory = FileDescriptor(fd);
  }
  if (received != static_cast<ssize_t>(sizeof(reply))) return std::nullopt;
  return reply;
}

Meeting meet_as_peer(const ShmOptions& options, Deadline deadline) {
  Meeting meeting;
  FileDescriptor connection = connect_to_rank_0(options, deadline);
  const ucred listener = peer_of(connection.get(), options);
  if (listener.uid != ::geteuid()) {
    fail(options, "found a process of another user (uid " + std::to_string(listener.uid) + ", not " +
                      std::to_string(::geteuid()) + ") on its group's socket: run all ranks as one user");
  }
  Hello hello;
  hello.rank = options.rank;
  hello.world = options.world;
  hello.pid = ::getpid();
  std::memcpy(hello.token, options.token.data(), kTokenBytes);
  ::send(connection.get(), &hello, sizeof(hello), MSG_NOSIGNAL);  // a failure shows in the answer
  if (!wait_readable(connection.get(), options, deadline)) {
    fail(options, "waited " + seconds_text(options.timeout_s) +
                      " for rank 0 to let it in: another rank did not come; see rank 0's message");
  }
  const std::optional<Reply> reply = receive_reply(connection.get(), meeting.memory);
  if (!reply) fail(options, "lost the connection to rank 0 while the group was set up: see rank 0's message");
  const Verdict verdict = reply->magic == kShmMagic ? reply->verdict : Verdict::wrong_version;
  if (verdict != Verdict::ok) fail(options, std::string("was refused by rank 0: ") + reason(verdict));
  struct stat status = {};
  if (!meeting.memory.valid() || ::fstat(meeting.memory.get(), &status) != 0 ||
      static_cast<uint64_t>(status.st_size) != reply->total_bytes) {
    fail(options, "got no usable memfd from rank 0: check `ulimit -n`");
  }
  meeting.total_bytes = reply->total_bytes;
  meeting.pids_are_shared = listener.pid == reply->pid;
  meeting.sockets.push_back(std::move(connection));
  return meeting;
}

void check(const ShmOptions& options) {
  if (options.world < 1 || options.world > kMaxRanks || options.rank < 0 || options.rank >= options.world) {
    fail(options, "is not a rank: worlds have 1 to " + std::to_string(kMaxRanks) + " ranks, counted from 0");
  }
  if (options.world == 1) return;
  if (options.socket_name.empty() || options.socket_name.size() > 100) {
    fail(options, "needs a socket name of 1 to 100 bytes, got " + std::to_string(options.socket_name.size()));
  }
  if (options.token.size() != kTokenBytes) {
    fail(options,
         "needs a token of " + std::to_string(kTokenBytes) + " bytes, got " + std::to_string(options.token.size()));
  }
}

}  // namespace

Meeting meet(const ShmOptions& options, Deadline deadline) {
  check(options);
  return options.rank == 0 ? meet_as_rank_0(options, deadline) : meet_as_peer(options, deadline);
}

void hand_out(const FileDescriptor& memory, const Meeting& meeting, const ShmOptions& options) {
  Reply reply;
  reply.total_bytes = meeting.total_bytes;
  reply.pid = ::getpid();
  for (size_t rank = 1; rank < meeting.sockets.size(); ++rank) {
    iovec data = {&reply, sizeof(reply)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = memory.get();
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    if (::sendmsg(meeting.sockets[rank].get(), &message, MSG_NOSIGNAL) < 0) {
      fail(options, "lost rank " + std::to_string(rank) + " while the group was set up" + system_error() +
                        ": see that rank's message");
    }
  }
}

}  // namespace fsdp2x::cpu
