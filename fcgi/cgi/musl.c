/* For a build with musl: the one name that a libsodium built for glibc asks of its C library and musl does not have.
 * Must not enter: anything that a function of the C library could do. */
#include <features.h>

#ifndef __GLIBC__
#include <string.h>

void __explicit_bzero_chk(void *data, size_t length, size_t room);

void
__explicit_bzero_chk(void *data, size_t length, size_t room)
{
    (void)room;
    explicit_bzero(data, length);
}
#else
typedef int tidegate_cgi_has_nothing_to_add;
#endif
