/* For a static build with glibc: users and groups out of /etc/passwd and /etc/group alone, as musl does it. glibc would load
 * modules into the static program for them, and only those of the glibc it was linked with.
 * Must not enter: anything else of a C library's. */
#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>

#ifdef __GLIBC__

int
getpwnam_r(const char *name, struct passwd *entry, char *room, size_t size, struct passwd **found)
{
    FILE *file = fopen("/etc/passwd", "re");
    int failed = file ? 0 : errno;
    *found = NULL;
    while (file && (failed = fgetpwent_r(file, entry, room, size, found)) == 0 && strcmp(entry->pw_name, name) != 0)
        *found = NULL;
    if (file)
        fclose(file);
    return failed == ENOENT ? 0 : failed;
}

int
getgrnam_r(const char *name, struct group *entry, char *room, size_t size, struct group **found)
{
    FILE *file = fopen("/etc/group", "re");
    int failed = file ? 0 : errno;
    *found = NULL;
    while (file && (failed = fgetgrent_r(file, entry, room, size, found)) == 0 && strcmp(entry->gr_name, name) != 0)
        *found = NULL;
    if (file)
        fclose(file);
    return failed == ENOENT ? 0 : failed;
}

/* Only what opens sockets asks these, and this program does not. */
struct passwd *
getpwnam(const char *name)
{
    (void)name;
    return NULL;
}

struct group *
getgrnam(const char *name)
{
    (void)name;
    return NULL;
}

#else
typedef int tidegate_cgi_asks_musl;
#endif
