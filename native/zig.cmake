# Compiles with zig (`pip install ziglang`), which brings the C library of every system with it, of every age: for wheels
# that run on systems older than the one that builds them, and on other processors.
# The environment variable ZIG_TARGET names the target, such as x86_64-linux-gnu.2.28 or aarch64-macos.
string(REGEX MATCH "^([a-z0-9_]+)-([a-z]+)" target "$ENV{ZIG_TARGET}")
set(CMAKE_SYSTEM_PROCESSOR ${CMAKE_MATCH_1})
if(CMAKE_MATCH_2 STREQUAL macos)
  set(CMAKE_SYSTEM_NAME Darwin)
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()
find_program(zig NAMES python-zig zig REQUIRED)
set(CMAKE_CXX_COMPILER ${zig} c++ -target $ENV{ZIG_TARGET})
# Stripped by the linker: the strip of the building machine may not know the target's format.
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
# It knows no -march for ARM.
set(arm -mcpu=generic)
