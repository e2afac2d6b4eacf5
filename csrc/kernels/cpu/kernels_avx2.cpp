// The kernel table for processors with AVX2 and F16C.
#define FSDP2X_KERNEL_TABLE kernel_table_avx2
#include "kernels/cpu/kernel_loops.hpp"
