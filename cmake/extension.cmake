# The extension module fsdp2x._C: csrc/engine and csrc/bind, linked to the torch that cmake/find_torch.py finds.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/find_torch.py" --dir "${FSDP2X_TORCH_DIR}"
  OUTPUT_VARIABLE torch_lines
  ERROR_VARIABLE torch_error
  RESULT_VARIABLE torch_status
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR "${torch_error}")
endif()
foreach(key IN ITEMS dir version cxx11_abi cuda)
  string(REGEX MATCH "(^|\n)${key}=([^\n]*)" _ "${torch_lines}")
  set(torch_${key} "${CMAKE_MATCH_2}")
endforeach()
message(STATUS "fsdp2x: torch ${torch_version} in ${torch_dir}")
if(torch_cuda AND FSDP2X_CUDA STREQUAL AUTO AND NOT CMAKE_CUDA_COMPILER_LOADED)
  message(WARNING "fsdp2x: torch is built for CUDA ${torch_cuda}, and no nvcc was found: on a GPU torch's operations will "
                  "run in place of fsdp2x's kernels, a launch or more for each parameter. Put nvcc on PATH, set CUDACXX to "
                  "it, or take it from packages (make build CUDA=wheels, or cmake/cuda_wheels.py).")
endif()

file(GLOB_RECURSE extension_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/engine/*.cpp"
     "${PROJECT_SOURCE_DIR}/csrc/bind/*.cpp")
Python_add_library(_C MODULE WITH_SOABI ${extension_sources})
target_compile_features(_C PRIVATE cxx_std_20)
target_include_directories(_C PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
# SYSTEM: warnings are for our own code. pybind11 is the copy that torch bundles: ProcessGroup and tensors cross.
target_include_directories(_C SYSTEM PRIVATE "${torch_dir}/include" "${torch_dir}/include/torch/csrc/api/include")
target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
# Messages of torch's headers name their files: as torch/..., not where the machine of the build has them.
target_compile_options(_C PRIVATE "-fmacro-prefix-map=${torch_dir}/=torch/")
# libtorch.so is left out: it is an empty shell that pulls in libtorch_cuda.so, of which nothing is used here.
target_link_libraries(_C PRIVATE fsdp2x_cpu fsdp2x_shm fsdp2x_core "${torch_dir}/lib/libtorch_python.so"
                                 "${torch_dir}/lib/libtorch_cpu.so" "${torch_dir}/lib/libc10.so")
# The static libraries' symbols stay hidden: torch brings a libcudart of its own, not to be mixed up with the static one.
target_link_options(_C PRIVATE -Wl,--exclude-libs,ALL)
# By which the test extension finds it.
target_link_options(_C PRIVATE "-Wl,-soname,$<TARGET_FILE_NAME:_C>")
# Whole, so that every build shows that the kernels link, and load without a driver.
target_link_libraries(_C PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,fsdp2x_cuda>)
# fsdp2x and torch lie side by side in site-packages, wherever that is.
set_target_properties(_C PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/../torch/lib")
if(FSDP2X_PCH)
  target_precompile_headers(_C PRIVATE $<$<COMPILE_LANGUAGE:CXX>:<torch/csrc/utils/pybind.h$<ANGLE-R>>
                            $<$<COMPILE_LANGUAGE:CXX>:<ATen/ATen.h$<ANGLE-R>>)
endif()

# Behind torch's headers every translation unit, an empty one, too, compiles pybind11's core again, which takes longer
# than most files of ours. So the files of a room are compiled as one unit; a name is told once in a room, as in its README.
if(FSDP2X_UNITY)
  foreach(source IN LISTS extension_sources)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}/csrc" OUTPUT_VARIABLE name)
    string(REGEX REPLACE "/[^/]*$" "" room "${name}")
    if(name STREQUAL "bind/module.cpp")
      set(room module) # as long as a whole room
    elseif(room MATCHES "^engine/(torch|memory|params)$")
      set(room engine/params)
    elseif(room MATCHES "^engine/transport")
      set(room engine/transport)
    endif()
    string(MAKE_C_IDENTIFIER "${room}" room)
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${room}")
  endforeach()
  set_target_properties(_C PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP UNITY_BUILD_RELOCATABLE ON)
endif()

# The test extension: see tests/cpp/device/README.md.
if(FSDP2X_TESTING)
  Python_add_library(_C_testing MODULE WITH_SOABI "${PROJECT_SOURCE_DIR}/tests/cpp/device/module.cpp"
                     "${PROJECT_SOURCE_DIR}/tests/cpp/device/recording_layer.cpp")
  target_compile_features(_C_testing PRIVATE cxx_std_20)
  target_include_directories(_C_testing PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
  target_include_directories(_C_testing SYSTEM PRIVATE "${torch_dir}/include" "${torch_dir}/include/torch/csrc/api/include")
  target_compile_definitions(_C_testing PRIVATE TORCH_EXTENSION_NAME=_C_testing _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
  add_dependencies(_C_testing _C)
  target_link_libraries(_C_testing PRIVATE fsdp2x_reference_kernels fsdp2x_core "${torch_dir}/lib/libtorch_python.so"
                                           "${torch_dir}/lib/libtorch_cpu.so" "${torch_dir}/lib/libc10.so")
  # By options: CMake links no modules, and some linkers drop what comes before the objects.
  target_link_options(_C_testing PRIVATE -Wl,--no-as-needed "$<TARGET_FILE:_C>" -Wl,--as-needed -Wl,--exclude-libs,ALL)
  set_target_properties(_C_testing PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN:$ORIGIN/../torch/lib"
                                              UNITY_BUILD "${FSDP2X_UNITY}")
  install(TARGETS _C_testing LIBRARY DESTINATION fsdp2x)
endif()

set(FSDP2X_TORCH_VERSION "${torch_version}")
set(FSDP2X_CUDA_LITERAL None)
if(FSDP2X_CUDA_VERSION)
  set(FSDP2X_CUDA_LITERAL "\"${FSDP2X_CUDA_VERSION}\"")
endif()
configure_file("${CMAKE_CURRENT_LIST_DIR}/build_info.py.in" "${PROJECT_BINARY_DIR}/_build_info.py" @ONLY)

install(TARGETS _C LIBRARY DESTINATION fsdp2x)
install(FILES "${PROJECT_BINARY_DIR}/_build_info.py" DESTINATION fsdp2x)
