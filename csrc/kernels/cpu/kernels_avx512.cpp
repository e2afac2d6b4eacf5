// The kernel table for processors with AVX-512 F, BW, VL, and DQ.
#define FSDP2X_KERNEL_TABLE kernel_table_avx512
#include "kernels/cpu/kernel_loops.hpp"
