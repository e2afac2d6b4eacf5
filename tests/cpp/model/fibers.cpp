// makecontext makes the stacks, and _longjmp switches them, which costs no system call.
#include "model/fibers.hpp"

#include <cxxabi.h>
#include <ucontext.h>

#include <cstring>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/lsan_interface.h>
#endif

namespace fsdp2x::model {
namespace {

constexpr size_t kStackBytes = 256 << 10;

Fibers* entering = nullptr;  // makecontext passes no pointer

}  // namespace

Fibers::Fibers(int count, std::function<void(int)> program)
    : program_(std::move(program)), fibers_(static_cast<size_t>(count)) {
  for (Fiber& fiber : fibers_) fiber.stack = std::make_unique<char[]>(kStackBytes);
}

void Fibers::make(int index) {
  running_ = index;
  Fiber& fiber = fibers_[static_cast<size_t>(index)];
  fiber.exceptions = {};
  fiber.fake_stack = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(fiber.stack.get(), kStackBytes);
#endif
  ucontext_t context, back;
  ::getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  ::makecontext(&context, &Fibers::enter, 0);
  entering = this;
  if (_setjmp(main_) == 0) {
    leave_main(fiber);
    ::swapcontext(&back, &context);
  }
  arrive_in_main();
}

void Fibers::resume(int index) {
  running_ = index;
  Fiber& fiber = fibers_[static_cast<size_t>(index)];
  if (_setjmp(main_) == 0) {
    leave_main(fiber);
    _longjmp(fiber.place, 1);
  }
  arrive_in_main();
}

void Fibers::give_way() {
  Fiber& fiber = fibers_[static_cast<size_t>(running_)];
  if (_setjmp(fiber.place) == 0) {
    leave_fiber(fiber);
    _longjmp(main_, 1);
  }
  arrive_in_fiber(fiber);
}

void Fibers::enter() { entering->main_of_fiber(); }

void Fibers::main_of_fiber() {
  Fiber& fiber = fibers_[static_cast<size_t>(running_)];
  arrive_in_fiber(fiber);
  give_way();  // made, not run
  program_(running_);
  leave_fiber(fiber);
  _longjmp(main_, 1);
}

// Exceptions in flight belong to a stack.
void Fibers::swap_exceptions(Fiber& fiber) {
  std::array<char, 16> other;
  void* const globals = abi::__cxa_get_globals();
  std::memcpy(other.data(), globals, other.size());
  std::memcpy(globals, fiber.exceptions.data(), other.size());
  fiber.exceptions = other;
}

#if defined(__SANITIZE_ADDRESS__)
// An abandoned run leaves its stacks and what they own in place. That is no leak of the program.
void Fibers::leave_main(Fiber& fiber) {
  swap_exceptions(fiber);
  __lsan_disable();
  __sanitizer_start_switch_fiber(&main_fake_stack_, fiber.stack.get(), kStackBytes);
}
void Fibers::arrive_in_main() {
  __sanitizer_finish_switch_fiber(main_fake_stack_, nullptr, nullptr);
  __lsan_enable();
}
void Fibers::leave_fiber(Fiber& fiber) {
  swap_exceptions(fiber);
  __sanitizer_start_switch_fiber(&fiber.fake_stack, main_stack_, main_stack_bytes_);
}
void Fibers::arrive_in_fiber(Fiber& fiber) {
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &main_stack_, &main_stack_bytes_);
}
#else
void Fibers::leave_main(Fiber& fiber) { swap_exceptions(fiber); }
void Fibers::arrive_in_main() {}
void Fibers::leave_fiber(Fiber& fiber) { swap_exceptions(fiber); }
void Fibers::arrive_in_fiber(Fiber&) {}
#endif

}  // namespace fsdp2x::model
