// Whether the modules of a model, and the names under which they register parameters, are those of a snapshot.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "engine/torch/gil.hpp"

namespace fsdp2x {

// `snapshot` has four entries for each module: its dict of children, their tuple, its dict of parameters, and how many
// of these are not None. It belongs to Python, whose garbage collector must see the way from it to the modules. Takes a
// few nanoseconds for each module, since it runs before every forward of a root.
bool is_same_tree(const Gil& gil, const pybind11::tuple& snapshot);

}  // namespace fsdp2x
