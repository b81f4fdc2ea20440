# `cmake --install build --prefix PLACE`: the program, the library, its header; find_package(evenkeel) and pkg-config find
# them there. The files name no place of their own, so the folder may be moved.
include(CMakePackageConfigHelpers)
install(TARGETS evenkeel RUNTIME)
install(TARGETS evenkeel_shared EXPORT evenkeel)
install(FILES include/evenkeel.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/evenkeel)
# The library needs nothing else to be linked, so the exported target is the whole configuration.
install(EXPORT evenkeel NAMESPACE evenkeel:: FILE evenkeelConfig.cmake DESTINATION ${package_folder})
write_basic_package_version_file(evenkeelConfigVersion.cmake COMPATIBILITY SameMinorVersion)
file(RELATIVE_PATH to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" to_prefix ${to_prefix})
file(CONFIGURE OUTPUT evenkeel.pc CONTENT [[
prefix=${pcfiledir}/@to_prefix@
libdir=${prefix}/@CMAKE_INSTALL_LIBDIR@
includedir=${prefix}/@CMAKE_INSTALL_INCLUDEDIR@

Name: evenkeel
Description: attention by a precision plan, forward and backward, on the CPU and on NVIDIA GPUs
Version: @PROJECT_VERSION@
Libs: -L${libdir} -levenkeel
Cflags: -I${includedir}
]] @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/evenkeelConfigVersion.cmake DESTINATION ${package_folder})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/evenkeel.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
