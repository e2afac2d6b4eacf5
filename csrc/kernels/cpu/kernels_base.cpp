// The kernel table for any processor that the package supports.
#define FSDP2X_KERNEL_TABLE kernel_table_base
#include "kernels/cpu/kernel_loops.hpp"
