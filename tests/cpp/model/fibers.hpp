// Programs on separate stacks. One of them runs at a time, and gives way explicitly.
#pragma once

#include <setjmp.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp2x::model {

class Fibers {
 public:
  // Fiber i runs `program(i)`, which must not throw.
  Fibers(int count, std::function<void(int)> program);

  // Puts fiber i before the start of its program. Drops its current state without unwinding.
  void make(int fiber);
  // Runs fiber i until it gives way or ends.
  void resume(int fiber);
  // On a fiber: returns to the caller of resume(), until it is resumed.
  void give_way();
  int running() const { return running_; }

 private:
  struct Fiber {
    std::unique_ptr<char[]> stack;
    jmp_buf place;
    std::array<char, 16> exceptions{};  // __cxa_eh_globals
    void* fake_stack = nullptr;         // AddressSanitizer's
  };
  static void enter();
  [[noreturn]] void main_of_fiber();
  // Each side of a stack switch: one call before the jump, one after it.
  void leave_main(Fiber& fiber);
  void arrive_in_main();
  void leave_fiber(Fiber& fiber);
  void arrive_in_fiber(Fiber& fiber);
  static void swap_exceptions(Fiber& fiber);

  std::function<void(int)> program_;
  std::vector<Fiber> fibers_;
  jmp_buf main_;
  void* main_fake_stack_ = nullptr;
  const void* main_stack_ = nullptr;
  size_t main_stack_bytes_ = 0;
  int running_ = 0;
};

}  // namespace fsdp2x::model
