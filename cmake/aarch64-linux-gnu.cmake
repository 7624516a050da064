# For 64-bit ARM on another processor, by Debian's g++-aarch64-linux-gnu; its programs run in qemu-user. `make test-arm`.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64) # QEMU_LD_PREFIX: where it finds ARM's system libraries
