// Compares a model's modules, and the names of their parameters, with a snapshot.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "engine/torch/gil.hpp"

namespace fsdp2x {

// `snapshot` has four entries for each module: its dict of children, their tuple, its dict of parameters, and how many
// of these are not None. Python owns it, because the garbage collector must see the path from it to the modules. The
// call takes a few nanoseconds for each module, since it runs before every forward of a root.
bool is_same_tree(const Gil& gil, const pybind11::tuple& snapshot);

}  // namespace fsdp2x
