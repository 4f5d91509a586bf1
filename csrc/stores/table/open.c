/* Finding, trusting and making a table's file. A file is made whole under no name and linked into place, so what
 * others find is always complete; it is opened without O_CREAT first, because creating over another user's file in a
 * sticky folder fails where fs.protected_regular is set. Must not enter: what is counted in it. */
#include "table.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <limits.h>
#include <pwd.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define SYSTEM_FOLDER "/run/tidegate"
#define MAKING_WAIT_MS 2000 /* in a folder that anyone may lock, nobody may hold us up for longer */
#define ATTEMPTS 16

/* ---- the URI ---- */

static tg_status
parse_size(tg_text text, uint64_t *bytes, tg_error *error)
{
    static const struct {
        const char *suffix;
        unsigned shift;
    } units[] = { { "KiB", 10 }, { "MiB", 20 }, { "GiB", 30 } };
    char shown[64];
    uint64_t number = 0;
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (text.length < 4 || memcmp(text.data + text.length - 3, units[i].suffix, 3) != 0)
            continue;
        if (!tg__text_number((tg_text){ text.data, text.length - 3 }, TG_TABLE_BYTES_MAX >> units[i].shift, &number))
            break;
        *bytes = number << units[i].shift;
        if (*bytes < TG_TABLE_BYTES_MIN)
            break;
        const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
        *bytes = (*bytes + page - 1) / page * page;
        return TG_OK;
    }
    return tg__error(error, TG_E_CONFIG, "size '%s': expected 64KiB to 16GiB, as a number with KiB, MiB or GiB",
                     tg__text_show(text, shown, sizeof shown));
}

static tg_status
parse_mode(tg_text text, unsigned *mode, tg_error *error)
{
    char shown[32];
    unsigned value = 0;
    bool sound = text.length >= 3 && text.length <= 4;
    for (size_t i = 0; sound && i < text.length; i++) {
        sound = text.data[i] >= '0' && text.data[i] <= '7';
        value = value * 8 + (unsigned)(text.data[i] - '0');
    }
    if (!sound || (value & 0600) != 0600 || (value & ~0660u) != 0)
        return tg__error(error, TG_E_CONFIG,
                         "mode '%s': expected 0600, 0640 or 0660; a table is never open to everybody",
                         tg__text_show(text, shown, sizeof shown));
    *mode = value;
    return TG_OK;
}

static tg_status
parse_group(tg_text text, gid_t *group, tg_error *error)
{
    char name[64], memory[4096];
    uint64_t number;
    tg__text_show(text, name, sizeof name);
    if (tg__text_number(text, UINT32_MAX - 1, &number)) {
        *group = (gid_t)number;
        return TG_OK;
    }
    struct group entry, *found = NULL;
    if (text.length > 0 && text.length < sizeof name && getgrnam_r(name, &entry, memory, sizeof memory, &found) == 0 &&
        found) {
        *group = found->gr_gid;
        return TG_OK;
    }
    return tg__error(error, TG_E_CONFIG, "group '%s': no such group", name);
}

static tg_status
parse_owners(tg_text text, tg_place *place, tg_error *error)
{
    char memory[4096];
    while (true) {
        const char *plus = text.length ? memchr(text.data, '+', text.length) : NULL;
        const tg_text one = { text.data, plus ? (size_t)(plus - text.data) : text.length };
        char name[64];
        uint64_t number;
        tg__text_show(one, name, sizeof name);
        if (place->owner_count == sizeof place->owners / sizeof *place->owners)
            return tg__error(error, TG_E_CONFIG, "owner: at most %zu users can be named",
                             sizeof place->owners / sizeof *place->owners);
        struct passwd entry, *found = NULL;
        if (tg__text_number(one, UINT32_MAX - 1, &number))
            place->owners[place->owner_count++] = (uid_t)number;
        else if (one.length > 0 && one.length < sizeof name &&
                 getpwnam_r(name, &entry, memory, sizeof memory, &found) == 0 && found)
            place->owners[place->owner_count++] = found->pw_uid;
        else
            return tg__error(error, TG_E_CONFIG, "owner '%s': no such user", name);
        if (!plus)
            return TG_OK;
        text = (tg_text){ plus + 1, text.length - one.length - 1 };
    }
}

static bool
name_sound(tg_text name)
{
    if (name.length == 0 || name.length > 64 || name.data[0] == '.')
        return false;
    for (size_t i = 0; i < name.length; i++) {
        const char c = name.data[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
              c == '-'))
            return false;
    }
    return true;
}

static bool
is_folder(const char *path)
{
    struct stat found;
    return stat(path, &found) == 0 && S_ISDIR(found.st_mode);
}

/* Where a named table lies: one place per name that every process of the user finds alike. */
static char *
path_of_name(const char *name)
{
    char *path = NULL;
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    int length;
    if (is_folder(SYSTEM_FOLDER))
        length = asprintf(&path, SYSTEM_FOLDER "/%s.v%u", name, TG_TABLE_LAYOUT);
    else if (runtime && runtime[0] == '/' && is_folder(runtime))
        length = asprintf(&path, "%s/tidegate/%s.v%u", runtime, name, TG_TABLE_LAYOUT);
    else
        length = asprintf(&path, "/dev/shm/tidegate-%lu-%s.v%u", (unsigned long)geteuid(), name, TG_TABLE_LAYOUT);
    return length == -1 ? NULL : path;
}

static tg_status
parse_where(const tg_store_uri *uri, tg_place *place, tg_error *error)
{
    char shown[80];
    const bool shared = tg__text_is(uri->scheme, "shared");
    if (shared && uri->rest.length > 0 && uri->rest.data[0] == '/') {
        if (uri->rest.length >= PATH_MAX || uri->rest.data[uri->rest.length - 1] == '/')
            return tg__error(error, TG_E_CONFIG, "store '%s': expected the path of a file",
                             tg__text_show(uri->rest, shown, sizeof shown));
        place->name = strndup(uri->rest.data, uri->rest.length);
        place->path = place->name ? strdup(place->name) : NULL;
    } else {
        const tg_text name = uri->rest.length > 0 ? uri->rest : tg_text_of("default");
        if (!name_sound(name))
            return tg__error(error, TG_E_CONFIG,
                             "table '%s': expected 1 to 64 letters, digits, '_', '-' or '.', not '.' first; a path "
                             "begins with '/' (shared:///path)",
                             tg__text_show(name, shown, sizeof shown));
        place->name = strndup(name.data, name.length);
        place->path = place->name && shared ? path_of_name(place->name) : NULL;
    }
    if (!place->name || (shared && !place->path))
        return tg__error(error, TG_E_NOMEM, "a table's path");
    return TG_OK;
}

tg_status
tg__place_parse(const tg_store_uri *uri, bool manual, tg_place *place, tg_error *error)
{
    *place = (tg_place){ .mode = 0600, .manual = manual };
    tg_status status = parse_where(uri, place, error);
    bool has_mode = false;
    for (size_t i = 0; status == TG_OK && i < uri->option_count; i++) {
        const tg_text name = uri->options[i].name, value = uri->options[i].value;
        char shown[64];
        if (tg__text_is(name, "size")) {
            status = parse_size(value, &place->bytes, error);
        } else if (!place->path) {
            status = tg__error(error, TG_E_CONFIG, "memory:// knows no option '%s': only size",
                               tg__text_show(name, shown, sizeof shown));
        } else if (tg__text_is(name, "mode")) {
            has_mode = true;
            status = parse_mode(value, &place->mode, error);
        } else if (tg__text_is(name, "group")) {
            place->has_group = true;
            status = parse_group(value, &place->group, error);
        } else if (tg__text_is(name, "owner")) {
            status = parse_owners(value, place, error);
        } else {
            status = tg__error(error, TG_E_CONFIG, "shared:// knows no option '%s': only size, mode, group, owner",
                               tg__text_show(name, shown, sizeof shown));
        }
    }
    if (status == TG_OK && place->has_group && !has_mode)
        place->mode = 0660;
    if (status == TG_OK && (place->mode & 0060) && !place->has_group)
        status = tg__error(error, TG_E_CONFIG, "mode %04o lets a group in: name it with group=", place->mode);
    if (status != TG_OK)
        tg__place_close(place);
    return status;
}

void
tg__place_close(tg_place *place)
{
    free(place->path);
    free(place->name);
    place->path = place->name = NULL;
}

/* ---- geometry and header ---- */

void
tg__map_geometry(tg_map *map, uint64_t bytes)
{
    uint32_t segments = 1;
    while (segments < TG_TABLE_SEGMENTS_MAX && bytes / (segments * 2) >= TG_TABLE_SEGMENT_BYTES_MIN)
        segments *= 2;
    const uint64_t side = bytes >= TG_SIDE_TABLE_BYTES_MIN ? TG_SIDE_BYTES : 0;
    const uint64_t lines = (bytes - TG_TABLE_HEADER_BYTES - side) / segments / 64;
    const uint64_t body = lines - sizeof(tg_segment) / 64;
    const uint64_t entries = body / 2;
    const uint64_t sets = entries / TG_SET_ENTRIES;
    const uint64_t overflow_sets = sets / 16 > 0 ? sets / 16 : 1;
    map->bytes = bytes;
    map->segment_count = segments;
    map->segment_bytes = lines * 64;
    map->overflow = (uint32_t)(overflow_sets * TG_SET_ENTRIES);
    map->entries = (uint32_t)((sets - overflow_sets) * TG_SET_ENTRIES);
    map->blocks = (uint32_t)(body - map->entries - map->overflow);
}

static void
boot_read(uint8_t boot_id[16])
{
    char text[64] = { 0 };
    memset(boot_id, 0, 16);
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd == -1)
        return; /* all zero: without /proc every boot looks alike; docs/clocks.md */
    const ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    size_t digits = 0;
    for (ssize_t i = 0; i < length && digits < 32; i++) {
        const char c = text[i];
        const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0)
            continue;
        boot_id[digits / 2] = (uint8_t)(boot_id[digits / 2] << 4 | digit);
        digits++;
    }
}

static uint64_t
time_namespace(void)
{
    struct stat found;
    return stat("/proc/self/ns/time", &found) == 0 ? (uint64_t)found.st_ino : 0;
}

int64_t
tg__utc_offset_now_us(void)
{
    struct timespec utc;
    clock_gettime(CLOCK_REALTIME, &utc);
    return (int64_t)utc.tv_sec * 1000000 + utc.tv_nsec / 1000 - (int64_t)tg__boot_now_us();
}

static void
header_check(const tg_header_page *header, uint8_t check[16])
{
    const tg_text piece = { (const char *)header, offsetof(tg_header_page, check) };
    tg__digest(&piece, 1, check, 16);
}

static void
header_write(const tg_map *map, bool manual)
{
    tg_header_page *const header = tg__map_header(map);
    memcpy(header->magic, "tidegate", 8);
    header->layout = TG_TABLE_LAYOUT;
    header->byte_order = TG_TABLE_BYTE_ORDER;
    header->pointer_bytes = sizeof(void *);
    header->lock_kind = TG_TABLE_LOCK_KIND;
    header->manual = manual;
    header->table_bytes = map->bytes;
    header->segment_bytes = map->segment_bytes;
    header->segment_count = map->segment_count;
    header->entries = map->entries;
    header->overflow = map->overflow;
    header->blocks = map->blocks;
    randombytes_buf(header->hash_key, sizeof header->hash_key);
    header_check(header, header->check);
    boot_read(header->boot_id);
    header->time_namespace = time_namespace();
    atomic_init(&header->utc_offset_us, manual ? 0 : tg__utc_offset_now_us());
    for (uint32_t i = 0; i < map->segment_count; i++) {
        tg_segment *const segment = tg__map_area(map, i).segment;
        segment->free_head = segment->lease_first = segment->lease_last = TG_BLOCK_NONE;
    }
}

/* ---- mapping ---- */

/* Maps a file, or with fd -1 memory that only forks share. */
static tg_status
map_new(uint64_t bytes, int fd, tg_map **made, tg_error *error)
{
    tg_map *map = calloc(1, sizeof *map);
    if (!map)
        return tg__error(error, TG_E_NOMEM, "table: %zu bytes", sizeof *map);
    tg__map_geometry(map, bytes);
    const int flags = fd == -1 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    map->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (map->base == MAP_FAILED) {
        const int reason = errno;
        free(map);
        return tg__error_system(error, TG_E_SYSTEM, reason, "table: mapping %" PRIu64 " bytes", bytes);
    }
    *made = map;
    return TG_OK;
}

void
tg__map_close(tg_map *map)
{
    if (!map)
        return;
    munmap(map->base, map->bytes);
    free(map);
}

static tg_status
memory_open(const tg_place *place, tg_map **map, tg_error *error)
{
    tg_map *made = NULL;
    const tg_status status = map_new(place->bytes ? place->bytes : TG_TABLE_BYTES_DEFAULT, -1, &made, error);
    if (status != TG_OK)
        return status;
    header_write(made, place->manual);
    memcpy(made->hash_key, tg__map_header(made)->hash_key, sizeof made->hash_key);
    made->manual = place->manual;
    *map = made;
    return TG_OK;
}

/* ---- trust ---- */

static tg_status
trust(const tg_place *place, const struct stat *found, tg_error *error)
{
    const char *path = place->path;
    const unsigned mode = found->st_mode & 07777;
    if (!S_ISREG(found->st_mode))
        return tg__error(error, TG_E_TRUST, "%s is not a regular file; name another table or remove it", path);
    bool known = found->st_uid == 0 || found->st_uid == geteuid();
    for (size_t i = 0; i < place->owner_count; i++)
        known = known || found->st_uid == place->owners[i];
    if (!known)
        return tg__error(error, TG_E_TRUST, "%s (mode %04o) belongs to user %lu; owner=%lu would trust it", path, mode,
                         (unsigned long)found->st_uid, (unsigned long)found->st_uid);
    if (mode & 0002)
        return tg__error(error, TG_E_TRUST,
                         "%s (owner %lu, mode %04o) can be written by everybody, which no option allows; chmod o-w it",
                         path, (unsigned long)found->st_uid, mode);
    if (mode & 0020 && !(place->has_group && found->st_gid == place->group))
        return tg__error(error, TG_E_TRUST,
                         "%s (owner %lu, mode %04o) can be written by group %lu; group=%lu would trust it", path,
                         (unsigned long)found->st_uid, mode, (unsigned long)found->st_gid,
                         (unsigned long)found->st_gid);
    return TG_OK;
}

typedef enum verdict { FILE_GOOD, FILE_OTHER_BOOT, FILE_BAD } verdict;

static tg_status
damaged(tg_error *error, const char *path, const char *what)
{
    return tg__error(error, TG_E_FORMAT, "%s: %s; remove it, or name another table", path, what);
}

/* Reads the header of a file that is trusted. FILE_BAD: `error` says why. */
static verdict
judge(const tg_place *place, int fd, const struct stat *found, tg_header_page *header, tg_status *status,
      tg_error *error)
{
    const char *path = place->path;
    uint8_t check[16], boot_id[16];
    const ssize_t length = pread(fd, header, sizeof *header, 0);
    if (length != (ssize_t)sizeof *header || memcmp(header->magic, "tidegate", 8) != 0) {
        *status = damaged(error, path, "not a table of tidegate");
        return FILE_BAD;
    }
    if (header->byte_order != TG_TABLE_BYTE_ORDER || header->layout != TG_TABLE_LAYOUT ||
        header->pointer_bytes != sizeof(void *) || header->lock_kind != TG_TABLE_LOCK_KIND) {
        *status = tg__error(error, TG_E_FORMAT,
                            "%s: a table of layout %" PRIu32 " (byte order %08" PRIx32
                            ", pointers %u, lock %u), expected layout %u (%08x, %zu, %u); remove it, or name another "
                            "table",
                            path, header->layout, header->byte_order, header->pointer_bytes, header->lock_kind,
                            TG_TABLE_LAYOUT, TG_TABLE_BYTE_ORDER, sizeof(void *), TG_TABLE_LOCK_KIND);
        return FILE_BAD;
    }
    header_check(header, check);
    tg_map expected = { .bytes = 0 };
    if (memcmp(check, header->check, sizeof check) != 0 || header->table_bytes < TG_TABLE_BYTES_MIN ||
        header->table_bytes > TG_TABLE_BYTES_MAX) {
        *status = damaged(error, path, "its header is damaged");
        return FILE_BAD;
    }
    tg__map_geometry(&expected, header->table_bytes);
    if (expected.segment_bytes != header->segment_bytes || expected.segment_count != header->segment_count ||
        expected.entries != header->entries || expected.overflow != header->overflow ||
        expected.blocks != header->blocks) {
        *status = damaged(error, path, "its header is damaged");
        return FILE_BAD;
    }
    if ((uint64_t)found->st_size != header->table_bytes) {
        *status = damaged(error, path, "its length is not what its header says");
        return FILE_BAD;
    }
    if ((header->manual != 0) != place->manual) {
        *status = tg__error(error, TG_E_FORMAT,
                            place->manual ? "%s is a table of the real clock; a manual clock needs a table of its own"
                                          : "%s is a table of a manual clock; the real clock needs a table of its own",
                            path);
        return FILE_BAD;
    }
    boot_read(boot_id);
    if (memcmp(boot_id, header->boot_id, sizeof boot_id) != 0)
        return FILE_OTHER_BOOT;
    if (!place->manual && header->time_namespace != time_namespace()) {
        *status = tg__error(error, TG_E_FORMAT,
                            "%s was made in another time namespace, whose clock differs; name another table", path);
        return FILE_BAD;
    }
    if (place->bytes != 0 && place->bytes != header->table_bytes) {
        *status = tg__error(error, TG_E_CONFIG,
                            "%s has %" PRIu64 " bytes, size= asks for %" PRIu64
                            "; drop size=, or remove the file while nobody uses it",
                            path, header->table_bytes, place->bytes);
        return FILE_BAD;
    }
    *status = TG_OK;
    return FILE_GOOD;
}

/* ---- opening and making ---- */

/* Opens what is there. TG_OK with *fd == -1: nothing is. */
static tg_status
open_existing(const tg_place *place, int *fd, struct stat *found, tg_error *error)
{
    *fd = open(place->path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (*fd == -1) {
        const int reason = errno;
        if (reason == ENOENT)
            return TG_OK;
        if (reason == ELOOP)
            return tg__error(error, TG_E_TRUST, "%s is a symbolic link; name the file itself", place->path);
        if (reason == EACCES || reason == EPERM || reason == EISDIR || reason == ENXIO) {
            struct stat there;
            if (lstat(place->path, &there) == 0)
                return tg__error_system(error, TG_E_TRUST, reason,
                                        "%s (owner %lu, group %lu, mode %04o) cannot be opened by user %lu; who makes "
                                        "it names the group that may with group=",
                                        place->path, (unsigned long)there.st_uid, (unsigned long)there.st_gid,
                                        (unsigned)(there.st_mode & 07777), (unsigned long)geteuid());
        }
        return tg__error_system(error, TG_E_SYSTEM, reason, "opening %s", place->path);
    }
    tg_status status = TG_OK;
    if (fstat(*fd, found) != 0)
        status = tg__error_system(error, TG_E_SYSTEM, errno, "%s", place->path);
    else
        status = trust(place, found, error);
    if (status != TG_OK) {
        close(*fd);
        *fd = -1;
    }
    return status;
}

static tg_status
map_file(const tg_header_page *header, int fd, const struct stat *found, tg_map **map, tg_error *error)
{
    tg_map *made = NULL;
    const tg_status status = map_new(header->table_bytes, fd, &made, error);
    if (status != TG_OK)
        return status;
    memcpy(made->hash_key, header->hash_key, sizeof made->hash_key);
    made->manual = header->manual != 0;
    made->device = found->st_dev;
    made->inode = found->st_ino;
    *map = made;
    return TG_OK;
}

/* The folder of a path, as a descriptor; `base` is the file's name in it. */
static int
folder_open(const char *path, const char **base)
{
    const char *slash = strrchr(path, '/');
    *base = slash + 1;
    char folder[PATH_MAX];
    const size_t length = (size_t)(slash - path);
    memcpy(folder, path, length);
    folder[length] = '\0';
    return open(length ? folder : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* One maker at a time where possible; linking decides in any case. */
static void
folder_lock(int folder)
{
    const struct timespec pause = { .tv_sec = 0, .tv_nsec = 5000000 };
    for (int waited_ms = 0; waited_ms < MAKING_WAIT_MS; waited_ms += 5) {
        if (flock(folder, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
            return;
        nanosleep(&pause, NULL);
    }
}

#ifdef TG_TEST_HOOKS
bool tg__table_no_tmpfile;
#else
#define tg__table_no_tmpfile false
#endif

/* A file without a name, or where the file system has none such, with one that nobody looks for. */
static int
nameless(int folder, const char *base, char name[NAME_MAX + 1])
{
    name[0] = '\0';
    const int fd = tg__table_no_tmpfile ? -1 : openat(folder, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (tg__table_no_tmpfile)
        errno = EOPNOTSUPP;
    if (fd != -1 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT && errno != EINVAL))
        return fd;
    snprintf(name, NAME_MAX + 1, ".%.100s.%08" PRIx32 "%08" PRIx32, base, randombytes_random(), randombytes_random());
    return openat(folder, name, O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0600);
}

static tg_status
allocate(const tg_place *place, int folder, int fd, uint64_t bytes, tg_error *error)
{
    const int failed = posix_fallocate(fd, 0, (off_t)bytes);
    if (failed == 0)
        return TG_OK;
    struct statvfs space;
    if ((failed == ENOSPC || failed == EDQUOT) && fstatvfs(folder, &space) == 0)
        return tg__error_system(error, TG_E_SYSTEM, failed,
                                "%s: a table of %" PRIu64 " bytes is wanted, %" PRIu64
                                " are free; make room, or ask for less with size=",
                                place->path, bytes, (uint64_t)space.f_bavail * space.f_frsize);
    return tg__error_system(error, TG_E_SYSTEM, failed, "%s: allocating %" PRIu64 " bytes", place->path, bytes);
}

static tg_status
hand_over(const tg_place *place, int fd, tg_error *error)
{
    struct stat made;
    if (fstat(fd, &made) != 0)
        return tg__error_system(error, TG_E_SYSTEM, errno, "%s", place->path);
    const uid_t owner = geteuid() == 0 && place->owner_count > 0 ? place->owners[0] : (uid_t)-1;
    const gid_t group = place->has_group && made.st_gid != place->group ? place->group : (gid_t)-1;
    if ((owner != (uid_t)-1 || group != (gid_t)-1) && fchown(fd, owner, group) != 0)
        return tg__error_system(error, TG_E_SYSTEM, errno, "%s: giving it to group %lu", place->path,
                                (unsigned long)place->group);
    if (fchmod(fd, place->mode) != 0) /* past the umask */
        return tg__error_system(error, TG_E_SYSTEM, errno, "%s: mode %04o", place->path, place->mode);
    return TG_OK;
}

/* Makes the file whole and links it. *made false with TG_OK: somebody else's is there now. */
static tg_status
make(const tg_place *place, int folder, const char *base, bool *made, tg_error *error)
{
    char name[NAME_MAX + 1], link_from[64];
    const uint64_t bytes = place->bytes ? place->bytes : TG_TABLE_BYTES_DEFAULT;
    tg_map *map = NULL;
    *made = false;
    const int fd = nameless(folder, base, name);
    if (fd == -1)
        return tg__error_system(error, TG_E_SYSTEM, errno, "making %s", place->path);
    tg_status status = allocate(place, folder, fd, bytes, error);
    TG_STEP("file allocated");
    if (status == TG_OK)
        status = hand_over(place, fd, error);
    if (status == TG_OK)
        status = map_new(bytes, fd, &map, error);
    if (status == TG_OK) {
        header_write(map, place->manual);
        TG_STEP("header written");
        snprintf(link_from, sizeof link_from, "/proc/self/fd/%d", fd);
        const int linked = name[0] ? linkat(folder, name, folder, base, 0)
                                   : linkat(AT_FDCWD, link_from, folder, base, AT_SYMLINK_FOLLOW);
        if (linked == 0)
            *made = true;
        else if (errno != EEXIST)
            status = tg__error_system(error, TG_E_SYSTEM, errno, "making %s", place->path);
    }
    TG_STEP("file linked");
    tg__map_close(map);
    if (name[0])
        unlinkat(folder, name, 0);
    close(fd);
    return status;
}

/* Only the file that was judged is taken away, not one that came meanwhile. */
static tg_status
discard(const tg_place *place, int folder, const char *base, const struct stat *judged, tg_error *error)
{
    struct stat there;
    if (fstatat(folder, base, &there, AT_SYMLINK_NOFOLLOW) != 0 || there.st_ino != judged->st_ino ||
        there.st_dev != judged->st_dev)
        return TG_OK;
    if (unlinkat(folder, base, 0) != 0 && errno != ENOENT)
        return tg__error_system(error, TG_E_SYSTEM, errno,
                                "%s is from another boot and cannot be removed; remove it", place->path);
    return TG_OK;
}

/* $XDG_RUNTIME_DIR is the user's own; our folder in it is made on first use. */
static void
folder_make(const tg_place *place)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char folder[PATH_MAX];
    const int length = snprintf(folder, sizeof folder, "%s/tidegate/", runtime ? runtime : "");
    if (!runtime || length >= (int)sizeof folder || strncmp(place->path, folder, (size_t)length) != 0 ||
        place->name[0] == '/')
        return;
    folder[length - 1] = '\0';
    mkdir(folder, 0700);
}

tg_status
tg__map_open(const tg_place *place, tg_map **map, tg_error *error)
{
    if (!place->path)
        return memory_open(place, map, error);
    int folder = -1, fd = -1;
    const char *base = NULL;
    tg_status status = TG_OK;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        struct stat found;
        tg_header_page header;
        verdict seen = FILE_OTHER_BOOT;
        status = open_existing(place, &fd, &found, error);
        if (status != TG_OK)
            break;
        if (fd != -1) {
            seen = judge(place, fd, &found, &header, &status, error);
            if (seen == FILE_GOOD)
                status = map_file(&header, fd, &found, map, error);
            if (seen != FILE_OTHER_BOOT)
                break;
        }
        if (place->existing) {
            status = tg__error_system(error, TG_E_SYSTEM, ENOENT, "%s: no table yet, nothing has been counted there",
                                      place->path);
            break;
        }
        if (folder == -1) {
            /* The first look was without the lock. With it, look again: somebody may have made it meanwhile. */
            folder_make(place);
            folder = folder_open(place->path, &base);
            if (folder == -1) {
                status = tg__error_system(error, TG_E_SYSTEM, errno, "the folder of %s", place->path);
                break;
            }
            folder_lock(folder);
        } else {
            bool made;
            if (fd != -1)
                status = discard(place, folder, base, &found, error);
            if (status == TG_OK)
                status = make(place, folder, base, &made, error);
            if (status != TG_OK)
                break;
        }
        if (fd != -1)
            close(fd);
        fd = -1;
        status = TG_E_SYSTEM; /* should the attempts run out */
        tg__error(error, status, "%s: made and removed again and again by others", place->path);
    }
    if (fd != -1)
        close(fd); /* the mapping keeps the file */
    if (folder != -1) {
        flock(folder, LOCK_UN); /* a child forked meanwhile holds the descriptor too */
        close(folder);
    }
    return status;
}

bool
tg__map_current(const tg_place *place, const tg_map *map)
{
    struct stat found;
    return !place->path ||
           (lstat(place->path, &found) == 0 && found.st_dev == map->device && found.st_ino == map->inode);
}
