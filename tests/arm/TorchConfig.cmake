# In place of the wheel's, which wants the CUDA toolkit for this processor: a C++ program needs these two libraries.
get_filename_component(TORCH_INSTALL_PREFIX ${CMAKE_CURRENT_LIST_DIR}/../../.. ABSOLUTE)
add_library(torch INTERFACE IMPORTED)
set_target_properties(
  torch
  PROPERTIES INTERFACE_INCLUDE_DIRECTORIES
             "${TORCH_INSTALL_PREFIX}/include;${TORCH_INSTALL_PREFIX}/include/torch/csrc/api/include"
             INTERFACE_LINK_LIBRARIES "${TORCH_INSTALL_PREFIX}/lib/libtorch_cpu.so;${TORCH_INSTALL_PREFIX}/lib/libc10.so")
