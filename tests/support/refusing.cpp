// Makes a system call or an allocation of one shared library fail: its table of imported functions is rewritten, so
// that torch, gloo and Python are left alone. Compiled by refusing.py.
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace {

struct Function {
  const char* name;
  void* wrapper;
  void* real;
  std::atomic<int> num_calls;
};

std::atomic<int> armed_function{-1}, armed_call{0}, armed_error{0};
std::atomic<bool> counting{false};
extern Function functions[];

bool refuses(int function) {
  if (!counting.load(std::memory_order_relaxed)) return false;
  const int call = ++functions[function].num_calls;
  if (armed_function != function || armed_call != call) return false;
  errno = armed_error;
  return true;
}

#define WRAPPER(index, result, name, parameters, arguments, failure)                \
  result wrap_##name parameters {                                                   \
    if (refuses(index)) return failure;                                             \
    return reinterpret_cast<result(*) parameters>(functions[index].real) arguments; \
  }

WRAPPER(0, int, memfd_create, (const char* name, unsigned flags), (name, flags), -1)
WRAPPER(1, int, ftruncate, (int fd, off_t size), (fd, size), -1)
WRAPPER(2, int, socket, (int domain, int type, int protocol), (domain, type, protocol), -1)
WRAPPER(3, int, bind, (int fd, const sockaddr* at, socklen_t size), (fd, at, size), -1)
WRAPPER(4, int, listen, (int fd, int num), (fd, num), -1)
WRAPPER(5, int, accept4, (int fd, sockaddr* at, socklen_t* size, int flags), (fd, at, size, flags), -1)
WRAPPER(6, int, connect, (int fd, const sockaddr* at, socklen_t size), (fd, at, size), -1)
WRAPPER(7, ssize_t, send, (int fd, const void* data, size_t size, int flags), (fd, data, size, flags), -1)
WRAPPER(8, ssize_t, recv, (int fd, void* data, size_t size, int flags), (fd, data, size, flags), -1)
WRAPPER(9, ssize_t, sendmsg, (int fd, const msghdr* message, int flags), (fd, message, flags), -1)
WRAPPER(10, ssize_t, recvmsg, (int fd, msghdr* message, int flags), (fd, message, flags), -1)
WRAPPER(11, int, getsockopt, (int fd, int level, int name, void* value, socklen_t* size),
        (fd, level, name, value, size), -1)
WRAPPER(12, void*, mmap, (void* at, size_t size, int protection, int flags, int fd, off_t offset),
        (at, size, protection, flags, fd, offset), MAP_FAILED)
WRAPPER(13, int, madvise, (void* at, size_t size, int advice), (at, size, advice), -1)
WRAPPER(14, ssize_t, pread, (int fd, void* data, size_t size, off_t offset), (fd, data, size, offset), -1)
WRAPPER(15, int, poll, (pollfd * items, nfds_t num, int timeout), (items, num, timeout), -1)

long wrap_syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (refuses(16)) return -1;
  using Call = long (*)(long, ...);
  return reinterpret_cast<Call>(functions[16].real)(number, a, b, c, d, e, f);
}

int wrap_fcntl(int fd, int command, void* argument) {
  if (refuses(17)) return -1;
  using Call = int (*)(int, int, ...);
  return reinterpret_cast<Call>(functions[17].real)(fd, command, argument);
}

void* wrap_new(size_t size) {
  if (refuses(18)) throw std::bad_alloc();
  return ::operator new(size);
}

#define ENTRY(name)                                             \
  {                                                             \
#name, reinterpret_cast < void*>(&wrap_##name), nullptr, {} \
  }
Function functions[] = {
    ENTRY(memfd_create),
    ENTRY(ftruncate),
    ENTRY(socket),
    ENTRY(bind),
    ENTRY(listen),
    ENTRY(accept4),
    ENTRY(connect),
    ENTRY(send),
    ENTRY(recv),
    ENTRY(sendmsg),
    ENTRY(recvmsg),
    ENTRY(getsockopt),
    ENTRY(mmap),
    ENTRY(madvise),
    ENTRY(pread),
    ENTRY(poll),
    ENTRY(syscall),
    ENTRY(fcntl),
    {"_Znwm", reinterpret_cast<void*>(&wrap_new), nullptr, {}},
};
constexpr int kNumFunctions = sizeof(functions) / sizeof(functions[0]);

// Rewrites the imports in one table of relocations.
int rewrite(const char* base, const ElfW(Rela) * table, size_t bytes, const ElfW(Sym) * symbols, const char* names) {
  int num = 0;
  const long page = sysconf(_SC_PAGESIZE);
  for (size_t i = 0; i < bytes / sizeof(ElfW(Rela)); ++i) {
    const unsigned long symbol = ELF64_R_SYM(table[i].r_info);
    if (symbol == 0) continue;
    const char* name = names + symbols[symbol].st_name;
    for (int f = 0; f < kNumFunctions; ++f) {
      if (strcmp(name, functions[f].name) != 0) continue;
      auto** const place = reinterpret_cast<void**>(const_cast<char*>(base) + table[i].r_offset);
      void* const start = reinterpret_cast<void*>(reinterpret_cast<unsigned long>(place) / page * page);
      if (mprotect(start, page, PROT_READ | PROT_WRITE) != 0) continue;
      functions[f].real = dlsym(RTLD_DEFAULT, name);  // the place may hold a stub that would overwrite it
      *place = functions[f].wrapper;
      ++num;
    }
  }
  return num;
}

int visit(dl_phdr_info* info, size_t, void* wanted) {
  if (strstr(info->dlpi_name, static_cast<const char*>(wanted)) == nullptr) return 0;
  const char* base = reinterpret_cast<const char*>(info->dlpi_addr);
  const ElfW(Rela) * tables[2] = {};
  size_t bytes[2] = {};
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    for (auto* entry = reinterpret_cast<const ElfW(Dyn)*>(base + info->dlpi_phdr[i].p_vaddr); entry->d_tag != DT_NULL;
         ++entry) {
      // The loader has added the base to these addresses.
      if (entry->d_tag == DT_JMPREL) tables[0] = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_PLTRELSZ) bytes[0] = entry->d_un.d_val;
      if (entry->d_tag == DT_RELA) tables[1] = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_RELASZ) bytes[1] = entry->d_un.d_val;
      if (entry->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    }
  }
  int num = 0;
  for (int i = 0; i < 2; ++i) {
    if (tables[i] != nullptr) num += rewrite(base, tables[i], bytes[i], symbols, names);
  }
  return num;
}

}  // namespace

extern "C" {
// Number of imports of the library (a part of its path) that pass through here from now on.
int install(const char* library) { return dl_iterate_phdr(&visit, const_cast<char*>(library)); }
int num_functions() { return kNumFunctions; }
const char* name_of(int function) { return functions[function].name; }
int num_calls(int function) { return functions[function].num_calls; }
// The `call`-th call from now on, from 1, of a function fails with `error`; -1: none does, and all are counted.
void arm(int function, int call, int error) {
  for (auto& one : functions) one.num_calls = 0;
  armed_function = function;
  armed_call = call;
  armed_error = error;
  counting = true;
}
void disarm() { counting = false; }
}
