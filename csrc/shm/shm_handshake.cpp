// Shares a memory file between ranks: memfd, abstract unix socket, and checks of the peer's identity.
//
//   rank 0     make the file, listen                                          | exchange
//   the others connect, check the listener's user, say Hello {rank, token ..} | exchange
//   rank 0     accept all that came, check user, token, version, world, rank; use the file; Reply + its descriptor
//              to the ranks, nothing to anybody else                          | exchange
//   the others take Reply and descriptor, check them, use the file            | exchange
//
// Each step only needs what happened before the previous exchange, so no rank waits for one that failed.
#include "shm/shm_handshake.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "core/error.hpp"
#include "shm/shm_limits.hpp"
#include "shm/shm_map.hpp"

namespace fsdp2x::cpu {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

struct Hello {
  uint64_t magic = kShmMagic;
  int32_t rank = 0;
  int32_t world = 0;
  int64_t pid = 0;
  char token[kTokenBytes] = {};
};

struct Reply {
  uint64_t magic = kShmMagic;
  uint64_t total_bytes = 0;
  int64_t pid = 0;  // rank 0's own pid
};

// Padding would also send bytes of the stack.
static_assert(std::has_unique_object_representations_v<Hello> && std::has_unique_object_representations_v<Reply>);

[[noreturn]] void fail(const ShmOptions& options, const std::string& what) {
  throw Error("shared memory: " + options.name(options.rank) + " " + what);
}

// Repeats a system call that a signal interrupted.
template <class Call>
auto retried(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

std::string system_error() { return std::string(" (") + std::strerror(errno) + ")"; }

sockaddr_un address_of(const ShmOptions& options, socklen_t& length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, options.socket_name.data(), options.socket_name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + options.socket_name.size());
  return address;
}

ucred peer_of(int fd, const ShmOptions& options) {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    fail(options, "cannot identify the process at the other end of its socket" + system_error());
  }
  return credentials;
}

FileDescriptor make_socket(const ShmOptions& options) {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) fail(options, "cannot make a unix socket" + system_error());
  return fd;
}

FileDescriptor make_memory(const ShmOptions& options, FileSizes sizes, size_t& total_bytes) {
  FileDescriptor memory(::memfd_create("fsdp2x", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) fail(options, "cannot make a memfd" + system_error());
  rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
  ::getrlimit(RLIMIT_FSIZE, &limit);  // exceeding it raises a signal
  int error = EFBIG;
  for (total_bytes = sizes.most_bytes; total_bytes >= sizes.least_bytes; total_bytes /= 4) {
    if (limit.rlim_cur != RLIM_INFINITY && total_bytes > limit.rlim_cur) continue;
    if (retried([&] { return ::ftruncate(memory.get(), static_cast<off_t>(total_bytes)); }) == 0) break;
    error = errno;
  }
  if (total_bytes < sizes.least_bytes) {
    errno = error;
    fail(options, "cannot make a sparse memfd of " + std::to_string(sizes.least_bytes) +
                      " bytes (only written pages take memory)" + system_error() + ". Check `ulimit -f`.");
  }
  // No rank may shrink it under the others' mappings.
  if (::fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) fail(options, "cannot seal its memfd" + system_error());
  return memory;
}

bool same_token(const ShmOptions& options, const Hello& hello) {
  unsigned difference = 0;
  for (size_t i = 0; i < kTokenBytes; ++i) {
    difference |= static_cast<unsigned char>(options.token[i]) ^ static_cast<unsigned char>(hello.token[i]);
  }
  return difference == 0;
}

void check(const ShmOptions& options) {
  if (options.world < 1 || options.world > kMaxRanks || options.rank < 0 || options.rank >= options.world) {
    fail(options, "is not a rank of its group of " + std::to_string(options.world) + ". Groups have 1 to " +
                      std::to_string(kMaxRanks) + " ranks, counted from 0.");
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

class Listener {  // rank 0
 public:
  Listener(const ShmOptions& options, FileSizes sizes) : options_(options), sizes_(sizes) {}

  void open(Rendezvous& result) {
    result.memory = make_memory(options_, sizes_, result.total_bytes);
    result.pids.assign(static_cast<size_t>(options_.world), 0);
    result.pids[0] = ::getpid();
    connections_.resize(static_cast<size_t>(options_.world));
    if (options_.world == 1) return;
    listener_ = make_socket(options_);
    socklen_t length = 0;
    const sockaddr_un address = address_of(options_, length);
    if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        ::listen(listener_.get(), SOMAXCONN) != 0) {
      fail(options_, "cannot listen on its unix socket" + system_error());
    }
  }

  // The ranks are waiting at the socket, but other processes may be waiting too.
  void accept_all(Rendezvous& result) {
    for (int num_missing = options_.world - 1; num_missing > 0;) {
      FileDescriptor connection(
          retried([&] { return ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); }));
      if (!connection.valid()) {
        if (errno == ECONNABORTED) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) break;
        fail(options_, "cannot accept a connection" + system_error());
      }
      const ucred peer = peer_of(connection.get(), options_);
      Hello hello;
      if (!listen_to(connection, peer, hello)) continue;
      const auto rank = static_cast<size_t>(hello.rank);
      result.pids[rank] = peer.pid == hello.pid ? peer.pid : 0;
      connections_[rank] = std::move(connection);
      --num_missing;
    }
    listener_.reset();
    for (int rank = 1; rank < options_.world; ++rank) {
      if (connections_[static_cast<size_t>(rank)].valid()) continue;
      fail(options_, "got no connection from " + options_.name(rank) + " at its socket" + refusals_);
    }
  }

  void send_memory(const Rendezvous& result) {
    Reply reply;
    reply.total_bytes = result.total_bytes;
    reply.pid = ::getpid();
    for (int rank = 1; rank < options_.world; ++rank) {
      iovec data = {&reply, sizeof(reply)};
      alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
      msghdr message = {};
      message.msg_iov = &data;
      message.msg_iovlen = 1;
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = result.memory.get();
      std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
      const FileDescriptor& connection = connections_[static_cast<size_t>(rank)];
      if (retried([&] { return ::sendmsg(connection.get(), &message, MSG_NOSIGNAL); }) != sizeof(reply)) {
        fail(options_, "cannot send its memfd to " + options_.name(rank) + system_error());
      }
    }
  }

 private:
  // Returns whether a rank that is still missing is at the other end. Any process may connect to an abstract socket.
  // That must not end the job.
  bool listen_to(const FileDescriptor& connection, const ucred& peer, Hello& hello) {
    const char* reason = nullptr;
    if (peer.uid != ::geteuid()) {
      reason = "belongs to another user";
    } else if (retried([&] { return ::recv(connection.get(), &hello, sizeof(hello), MSG_TRUNC); }) != sizeof(hello)) {
      reason = "sent no valid greeting";
    } else if (hello.magic != kShmMagic) {
      reason = "does not run this version of fsdp2x";
    } else if (!same_token(options_, hello)) {
      reason = "sent a wrong token";
    } else if (hello.world != options_.world) {
      reason = "expects another number of ranks";
    } else if (hello.rank < 1 || hello.rank >= options_.world ||
               connections_[static_cast<size_t>(hello.rank)].valid()) {
      reason = "claims a rank that is already connected or does not exist";
    }
    if (reason == nullptr) return true;
    if (refusals_.size() < 200) refusals_ += "; rejected process " + std::to_string(peer.pid) + ", which " + reason;
    return false;
  }

  const ShmOptions& options_;
  FileSizes sizes_;
  FileDescriptor listener_;
  std::vector<FileDescriptor> connections_;  // by rank
  std::string refusals_;
};

class Connector {  // every other rank
 public:
  Connector(const ShmOptions& options, FileSizes sizes) : options_(options), sizes_(sizes) {}

  void connect(Rendezvous& result) {
    connection_ = make_socket(options_);
    socklen_t length = 0;
    const sockaddr_un address = address_of(options_, length);
    const auto* where = reinterpret_cast<const sockaddr*>(&address);
    if (retried([&] { return ::connect(connection_.get(), where, length); }) != 0) {
      fail(options_, "cannot connect to " + options_.name(0) + system_error());
    }
    const ucred listener = peer_of(connection_.get(), options_);
    if (listener.uid != ::geteuid()) {
      fail(options_, "found a process of another user (uid " + std::to_string(listener.uid) + ", not " +
                         std::to_string(::geteuid()) + ") on its group's socket. Run all ranks as one user.");
    }
    listener_pid_ = listener.pid;
    Hello hello;
    hello.rank = options_.rank;
    hello.world = options_.world;
    hello.pid = ::getpid();
    std::memcpy(hello.token, options_.token.data(), kTokenBytes);
    if (retried([&] { return ::send(connection_.get(), &hello, sizeof(hello), MSG_NOSIGNAL); }) != sizeof(hello)) {
      fail(options_, "cannot send its greeting to " + options_.name(0) + system_error());
    }
    result.pids_are_shared = false;
  }

  void take_memory(Rendezvous& result) {
    Reply reply;
    result.memory = receive(reply);
    struct stat status = {};
    if (reply.magic != kShmMagic)
      fail(options_, "got a reply from another version of fsdp2x. Install the same version on all ranks.");
    if (!result.memory.valid() || ::fstat(result.memory.get(), &status) != 0) {
      fail(options_, "got no memfd from " + options_.name(0) + ". Check `ulimit -n`.");
    }
    // A file that can shrink would turn reads into SIGBUS.
    const int seals = ::fcntl(result.memory.get(), F_GET_SEALS);
    const bool is_right = S_ISREG(status.st_mode) && static_cast<uint64_t>(status.st_size) == reply.total_bytes &&
                          reply.total_bytes >= sizes_.least_bytes && reply.total_bytes <= sizes_.most_bytes &&
                          seals >= 0 && (seals & kSeals) == kSeals;
    if (!is_right) fail(options_, "got a file from " + options_.name(0) + " that is not its memfd");
    result.total_bytes = reply.total_bytes;
    result.pids_are_shared = listener_pid_ == reply.pid;
    connection_.reset();
  }

 private:
  // Returns the descriptor that came with the message of rank 0, if any. Closes all others.
  FileDescriptor receive(Reply& reply) {
    constexpr size_t kMaxDescriptors = 8;
    iovec data = {&reply, sizeof(reply)};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control = {};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t received =
        retried([&] { return ::recvmsg(connection_.get(), &message, MSG_CMSG_CLOEXEC | MSG_TRUNC); });
    if (received < 0) fail(options_, "got no reply from " + options_.name(0) + system_error());
    FileDescriptor descriptor;  // nothing may allocate meanwhile: a descriptor without an owner stays open
    size_t num_descriptors = 0;
    for (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, const_cast<cmsghdr*>(header))) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      for (size_t at = CMSG_LEN(0); at + sizeof(int) <= header->cmsg_len; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, reinterpret_cast<const char*>(header) + at, sizeof(fd));
        descriptor = FileDescriptor(fd);
        ++num_descriptors;
      }
    }
    if (received != static_cast<ssize_t>(sizeof(reply)) || num_descriptors > 1) {
      fail(options_, "got an invalid reply from " + options_.name(0));
    }
    return descriptor;
  }

  const ShmOptions& options_;
  FileSizes sizes_;
  FileDescriptor connection_;
  pid_t listener_pid_ = 0;
};

// Collective: runs a step and reports its result to the other ranks. Returns false if it failed on any rank. Between
// two exchanges, nothing is allocated outside of the steps: a rank without memory would leave the others waiting.
template <class Step>
bool all_succeed(const ShmOptions& options, const Step& step, std::string& reason) {
  std::string outcome;
  try {
    step();
  } catch (const Error& error) {
    outcome = error.what();
  } catch (const std::exception& error) {
    outcome = "shared memory: " + options.name(options.rank) + " failed to enter its group (" + error.what() + ")";
  }
  const std::vector<std::string> outcomes =
      options.world == 1 ? std::vector<std::string>{outcome} : options.exchange(outcome);
  size_t num_failed = 0;
  for (const std::string& text : outcomes) {
    if (text.empty()) continue;
    if (num_failed++ == 0) reason = text;
  }
  if (num_failed > 1) reason += "; " + std::to_string(num_failed - 1) + " more ranks failed too";
  return num_failed == 0;
}

}  // namespace

std::optional<Rendezvous> rendezvous(const ShmOptions& options, FileSizes sizes,
                                     const std::function<void(Rendezvous&)>& use, std::string& reason) {
  Rendezvous result;
  Listener listener(options, sizes);
  Connector connector(options, sizes);
  const bool is_listener = options.rank == 0;
  const auto open = [&] {
    check(options);
    if (is_listener) listener.open(result);
  };
  const auto connect = [&] {
    if (!is_listener) connector.connect(result);
  };
  const auto send_memory = [&] {
    if (!is_listener) return;
    listener.accept_all(result);
    use(result);
    listener.send_memory(result);
  };
  const auto take_memory = [&] {
    if (is_listener) return;
    connector.take_memory(result);
    use(result);
  };
  const bool all_succeeded = all_succeed(options, open, reason) && all_succeed(options, connect, reason) &&
                             all_succeed(options, send_memory, reason) && all_succeed(options, take_memory, reason);
  if (!all_succeeded) return std::nullopt;
  return result;
}

}  // namespace fsdp2x::cpu
