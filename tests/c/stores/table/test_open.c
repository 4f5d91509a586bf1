/* Where a table lies, who is trusted with it, how it is made, and what is not taken for one. Built with
 * TG_TEST_HOOKS. */
#include "table_test.h"

#include <dirent.h>
#include <grp.h>
#include <sys/mount.h>
#include <sys/time.h>


static tg_error error;

/* The status of opening; `error` has its words. */
static tg_status
try_open(const char *name_and_options)
{
    tg_store *store = NULL;
    memset(&error, 0, sizeof error);
    const tg_status status = tg_store_open(tg_text_of(uri_of(name_and_options)), NULL, &store, &error);
    if (status == TG_OK)
        tg_store_close(store);
    return status;
}

static void
assert_says(const char *words)
{
    if (!strstr(error.message, words))
        fail_msg("'%s' does not say '%s'", error.message, words);
}

static void
make_table(const char *name_and_options)
{
    assert_int_equal(try_open(name_and_options), TG_OK);
}

static void
write_at(const char *name, size_t offset, const void *bytes, size_t length)
{
    const int fd = open(path_of(name), O_WRONLY | O_CLOEXEC);
    assert_int_not_equal(fd, -1);
    assert_int_equal(pwrite(fd, bytes, length, (off_t)offset), length);
    close(fd);
}

static struct stat
stat_of(const char *name)
{
    struct stat found;
    assert_int_equal(lstat(path_of(name), &found), 0);
    return found;
}

static unsigned
files_in_folder(void)
{
    unsigned count = 0;
    DIR *folder = opendir(test_folder);
    assert_non_null(folder);
    for (struct dirent *entry; (entry = readdir(folder)); count++)
        continue;
    closedir(folder);
    return count - 2;
}

/* ---- the URI ---- */

static void
a_wrong_uri_is_refused_with_what_was_expected(void **state)
{
    (void)state;
    static const struct {
        const char *uri, *says;
    } cases[] = {
        { "shared://.hidden", "letters" },
        { "shared://a b", "letters" },
        { "shared://x/y", "letters" },
        { "shared://aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "1 to 64" },
        { "shared:///folder/", "path of a file" },
        { "shared:///tmp/x?size=63KiB", "64KiB to 16GiB" },
        { "shared:///tmp/x?size=17GiB", "64KiB to 16GiB" },
        { "shared:///tmp/x?size=16MB", "KiB, MiB or GiB" },
        { "shared:///tmp/x?size=-1MiB", "KiB, MiB or GiB" },
        { "shared:///tmp/x?mode=0666", "0600, 0640 or 0660" },
        { "shared:///tmp/x?mode=0400", "0600, 0640 or 0660" },
        { "shared:///tmp/x?mode=0660", "group=" },
        { "shared:///tmp/x?group=no-such-group", "no such group" },
        { "shared:///tmp/x?owner=no-such-user", "no such user" },
        { "shared:///tmp/x?owner=root+", "no such user" },
        { "shared:///tmp/x?colour=red", "only size, mode, group, owner" },
        { "memory://x?mode=0600", "only size" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tg_store *store = NULL;
        assert_int_equal(tg_store_open(tg_text_of(cases[i].uri), NULL, &store, &error), TG_E_CONFIG);
        assert_says(cases[i].says);
    }
}

static void
every_size_has_room_for_entries_and_logs(void **state)
{
    (void)state;
    for (uint64_t bytes = TG_TABLE_BYTES_MIN; bytes <= TG_TABLE_BYTES_MAX; bytes += bytes / 3 / 4096 * 4096 + 4096) {
        tg_map map = { .bytes = 0 };
        tg__map_geometry(&map, bytes);
        assert_true(map.segment_count >= 1 && map.segment_count <= TG_TABLE_SEGMENTS_MAX);
        assert_int_equal(map.segment_count & (map.segment_count - 1), 0);
        const uint64_t side = bytes >= TG_SIDE_TABLE_BYTES_MIN ? TG_SIDE_BYTES : 0;
        assert_true(TG_TABLE_HEADER_BYTES + map.segment_count * map.segment_bytes + side <= bytes);
        assert_true(sizeof(tg_segment) + 64 * ((uint64_t)map.entries + map.overflow + map.blocks) <= map.segment_bytes);
        assert_int_equal(map.entries % TG_SET_ENTRIES, 0);
        assert_true(map.overflow >= TG_SET_ENTRIES && map.entries > 8 * map.overflow);
        /* nothing but a stated fixed part besides entries and blocks */
        assert_true(64 * ((uint64_t)map.entries + map.overflow + map.blocks) * map.segment_count >=
                    bytes - side - TG_TABLE_HEADER_BYTES - map.segment_count * (sizeof(tg_segment) + 128) - 64 * 64);
    }
}

static void
a_named_table_lies_in_the_runtime_folder_under_a_name_with_its_layout(void **state)
{
    (void)state;
    if (access("/run/tidegate", F_OK) == 0)
        skip(); /* /run/tidegate goes before it, and is not a test's to write in */
    assert_int_equal(setenv("XDG_RUNTIME_DIR", test_folder, 1), 0);
    tg_store *store = store_of("shared://named?size=64KiB", NULL);
    assert_int_equal(access(path_of("tidegate/named.v3"), F_OK), 0);
    tg_store_close(store);
    unlink(path_of("tidegate/named.v3"));
    assert_int_equal(stat_of("tidegate").st_mode & 07777, 0700);
    rmdir(path_of("tidegate"));
    assert_int_equal(unsetenv("XDG_RUNTIME_DIR"), 0);
    char name[64], path[160];
    snprintf(name, sizeof name, "shared://tidegate-test-%d?size=64KiB", (int)getpid());
    snprintf(path, sizeof path, "/dev/shm/tidegate-%lu-tidegate-test-%d.v3", (unsigned long)geteuid(), (int)getpid());
    store = store_of(name, NULL);
    assert_int_equal(access(path, F_OK), 0);
    tg_store_close(store);
    unlink(path);
}

/* ---- making ---- */

static void
a_new_table_is_whole_private_and_leaves_nothing_beside_it(void **state)
{
    (void)state;
    const unsigned before = files_in_folder();
    const mode_t mask = umask(0777);
    make_table("new?size=1MiB");
    umask(mask);
    const struct stat found = stat_of("new");
    assert_int_equal(found.st_size, 1 << 20);
    assert_true(found.st_blocks * 512 >= 1 << 20); /* allocated: no SIGBUS later */
    assert_int_equal(found.st_mode & 07777, 0600);
    assert_int_equal(files_in_folder(), before + 1);
    make_table("default");
    assert_int_equal(stat_of("default").st_size, 16 << 20);
    unlink(path_of("default"));
}

static void
where_there_are_no_nameless_files_the_temporary_one_goes_away(void **state)
{
    (void)state;
    const unsigned before = files_in_folder();
    tg__table_no_tmpfile = true;
    make_table("named?size=64KiB");
    tg__table_no_tmpfile = false;
    assert_int_equal(files_in_folder(), before + 1);
    assert_int_equal(stat_of("named").st_nlink, 1);
}

static const char *die_at;

static void
die_there(const char *step)
{
    if (strcmp(step, die_at) == 0)
        kill(getpid(), SIGKILL);
}

static void
a_death_while_making_leaves_no_half_table(void **state)
{
    (void)state;
    static const char *const steps[] = { "file allocated", "header written", "file linked" };
    for (int named = 0; named < 2; named++)
        for (size_t i = 0; i < 3; i++) {
            unlink(path_of("half"));
            const pid_t pid = fork();
            if (pid == 0) {
                die_at = steps[i];
                tg__table_hook = die_there;
                tg__table_no_tmpfile = named;
                tg_store *store;
                tg_store_open(tg_text_of(uri_of("half?size=64KiB")), NULL, &store, NULL);
                _exit(0);
            }
            assert_int_equal(child_end(pid), -SIGKILL);
            assert_int_equal(access(path_of("half"), F_OK) == 0, i == 2);
            make_table("half?size=64KiB");
            assert_table_sound(path_of("half"));
        }
}

static void
processes_that_open_at_once_get_one_table(void **state)
{
    (void)state;
    for (int round = 0; round < 5; round++) {
        unlink(path_of("race"));
        int start[2];
        assert_int_equal(pipe(start), 0);
        pid_t pids[20];
        for (size_t i = 0; i < 20; i++) {
            pids[i] = fork();
            if (pids[i] == 0) {
                char byte;
                tg_store *store;
                tg_limiter *limiter;
                close(start[1]);
                if (read(start[0], &byte, 1) != 0) /* until the parent closes it */
                    _exit(100);
                const tg_limiter_options options = { .rules = tg_text_of("7/hour") };
                if (tg_store_open(tg_text_of(uri_of("race?size=256KiB")), NULL, &store, NULL) != TG_OK ||
                    tg_limiter_open(store, NULL, &options, &limiter, NULL) != TG_OK)
                    _exit(101);
                int admitted = 0;
                for (int n = 0; n < 3; n++)
                    admitted += hit(limiter, "a");
                _exit(admitted);
            }
        }
        close(start[0]);
        close(start[1]);
        int admitted = 0;
        for (size_t i = 0; i < 20; i++)
            admitted += child_end(pids[i]);
        assert_int_equal(admitted, 7);
    }
}

static void
a_full_disk_leaves_nothing_behind_and_says_how_much_was_wanted(void **state)
{
    (void)state;
    assert_int_equal(mkdir(path_of("small"), 0700), 0);
    if (mount("tmpfs", path_of("small"), "tmpfs", 0, "size=256k") != 0) {
        rmdir(path_of("small"));
        print_message("skipped: mounting a small file system needs root: %s\n", strerror(errno));
        skip();
    }
    const tg_status big = try_open("small/table?size=1MiB");
    const tg_error words = error;
    const bool left = access(path_of("small/table"), F_OK) == 0;
    const tg_status fits = try_open("small/table?size=128KiB");
    tg__table_no_tmpfile = true;
    const tg_status named = try_open("small/other?size=1MiB");
    tg__table_no_tmpfile = false;
    DIR *folder = opendir(path_of("small"));
    unsigned files = 0;
    while (readdir(folder))
        files++;
    closedir(folder);
    assert_int_equal(umount(path_of("small")), 0);
    rmdir(path_of("small"));
    assert_int_equal(big, TG_E_SYSTEM);
    assert_int_equal(named, TG_E_SYSTEM);
    assert_int_equal(words.system_error, ENOSPC);
    error = words;
    assert_says("1048576 bytes");
    assert_says("262144 are free");
    assert_false(left);
    assert_int_equal(fits, TG_OK);
    assert_int_equal(files, 3); /* "." and ".." and the one that fits */
}

/* ---- what is not taken for a table ---- */

static void
another_size_is_refused_and_none_takes_what_is_there(void **state)
{
    (void)state;
    make_table("sized?size=128KiB");
    assert_int_equal(try_open("sized?size=256KiB"), TG_E_CONFIG);
    assert_says("131072");
    assert_says("262144");
    assert_int_equal(try_open("sized"), TG_OK);
    assert_int_equal(stat_of("sized").st_size, 128 << 10);
}

static void
a_foreign_older_or_damaged_file_is_refused_with_its_path_and_the_remedy(void **state)
{
    (void)state;
    static const uint32_t older = 0, swapped = 0x04030201;
    static const uint8_t half = 4;
    static const struct {
        const char *what, *says;
        size_t offset;
        const void *bytes;
        size_t length;
    } cases[] = {
        { "foreign", "not a table", 0, "#!/bin/sh\n", 10 },
        { "older", "layout 0", offsetof(tg_header_page, layout), &older, 4 },
        { "other byte order", "byte order 04030201", offsetof(tg_header_page, byte_order), &swapped, 4 },
        { "other pointers", "pointers 4", offsetof(tg_header_page, pointer_bytes), &half, 1 },
        { "other lock", "lock 4", offsetof(tg_header_page, lock_kind), &half, 1 },
        { "damaged size", "damaged", offsetof(tg_header_page, table_bytes), "\0\0\0\0\0\1", 6 },
        { "damaged key", "damaged", offsetof(tg_header_page, hash_key), "changed", 7 },
        { "damaged geometry", "damaged", offsetof(tg_header_page, entries), "\1\1\1", 3 },
        { "damaged check", "damaged", offsetof(tg_header_page, check), "changed", 7 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unlink(path_of("bad"));
        make_table("bad?size=64KiB");
        write_at("bad", cases[i].offset, cases[i].bytes, cases[i].length);
        if (try_open("bad") != TG_E_FORMAT)
            fail_msg("%s was accepted", cases[i].what);
        assert_says(cases[i].says);
        assert_says(path_of("bad"));
        assert_says("remove it");
        assert_int_equal(stat_of("bad").st_size, 64 << 10); /* and is left alone */
    }
    assert_int_equal(truncate(path_of("bad"), 40000), 0);
    assert_int_equal(try_open("bad"), TG_E_FORMAT);
    unlink(path_of("bad"));
    make_table("bad?size=64KiB");
    assert_int_equal(truncate(path_of("bad"), 40000), 0);
    assert_int_equal(try_open("bad"), TG_E_FORMAT);
    assert_says("length");
    assert_int_equal(truncate(path_of("bad"), 0), 0);
    assert_int_equal(try_open("bad"), TG_E_FORMAT);
    assert_int_equal(tg_store_open(tg_text_of(uri_of("bad")), NULL, &(tg_store *){ NULL }, NULL), TG_E_FORMAT);
    unlink(path_of("bad"));
}

static void
a_table_of_another_boot_is_made_anew(void **state)
{
    (void)state;
    unlink(path_of("boot"));
    tg_store *store = store_of(uri_of("boot?size=64KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "3/hour");
    for (int i = 0; i < 3; i++)
        assert_true(hit(limiter, "a"));
    tg_limiter_close(limiter);
    tg_store_close(store);
    const ino_t before = stat_of("boot").st_ino;
    write_at("boot", offsetof(tg_header_page, boot_id), "another boot's", 14);
    store = store_of(uri_of("boot?size=64KiB"), NULL);
    limiter = limiter_of(store, "3/hour");
    assert_true(hit(limiter, "a"));
    assert_int_equal(remaining(limiter, "a"), 2);
    assert_true(stat_of("boot").st_ino != before);
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
the_same_boot_keeps_what_was_counted(void **state)
{
    (void)state;
    unlink(path_of("kept"));
    for (int i = 0; i < 4; i++) { /* R163: a worker restarts */
        tg_store *store = store_of(uri_of("kept?size=64KiB"), NULL);
        tg_limiter *limiter = limiter_of(store, "3/hour");
        assert_int_equal(hit(limiter, "a"), i < 3);
        tg_limiter_close(limiter);
        tg_store_close(store);
    }
}

static void
another_time_namespace_is_refused(void **state)
{
    (void)state;
    unlink(path_of("bad"));
    make_table("bad?size=64KiB");
    const uint64_t other = 4242;
    write_at("bad", offsetof(tg_header_page, time_namespace), &other, sizeof other);
    assert_int_equal(try_open("bad"), TG_E_FORMAT);
    assert_says("time namespace");
    unlink(path_of("bad"));
}

static void
a_manual_clock_and_the_real_one_never_share_a_table(void **state)
{
    (void)state;
    unlink(path_of("real"));
    unlink(path_of("manual"));
    make_table("real?size=64KiB");
    tg_clock *clock = clock_at(5);
    const tg_store_options options = { .clock = clock };
    tg_store *store = NULL;
    assert_int_equal(tg_store_open(tg_text_of(uri_of("real")), &options, &store, &error), TG_E_FORMAT);
    assert_says("real clock");
    store = store_of(uri_of("manual?size=64KiB"), clock);
    assert_int_equal(tg_store_now_us(store), 5);
    assert_int_equal(tg_store_utc_offset_us(store), 0);
    assert_int_equal(try_open("manual"), TG_E_FORMAT);
    assert_says("manual clock");
    tg_store_close(store);
    tg_clock_close(clock);
}

/* ---- trust ---- */

static void
links_folders_and_pipes_are_no_tables(void **state)
{
    (void)state;
    unlink(path_of("real"));
    make_table("real?size=64KiB");
    char target[192];
    snprintf(target, sizeof target, "%s", path_of("real"));
    assert_int_equal(symlink(target, path_of("link")), 0);
    assert_int_equal(try_open("link"), TG_E_TRUST);
    assert_says("symbolic link");
    assert_int_equal(mkdir(path_of("folder"), 0700), 0);
    assert_int_equal(try_open("folder"), TG_E_TRUST);
    assert_int_equal(mkfifo(path_of("pipe"), 0600), 0);
    assert_int_equal(try_open("pipe"), TG_E_TRUST);
    assert_says("not a regular file");
    unlink(path_of("link"));
    unlink(path_of("pipe"));
    rmdir(path_of("folder"));
    assert_int_equal(try_open("no-such-folder/table"), TG_E_SYSTEM);
    assert_says("no-such-folder");
}

static void
a_table_that_everybody_can_write_is_not_trusted(void **state)
{
    (void)state;
    unlink(path_of("open"));
    make_table("open?size=64KiB");
    assert_int_equal(chmod(path_of("open"), 0606), 0);
    assert_int_equal(try_open("open"), TG_E_TRUST);
    assert_says(path_of("open"));
    assert_says("0606");
    assert_says("chmod o-w");
    assert_int_equal(chmod(path_of("open"), 0604), 0);
    assert_int_equal(try_open("open"), TG_OK);
}

static void
a_group_may_write_only_where_it_is_named(void **state)
{
    (void)state;
    unlink(path_of("team"));
    char uri[64], words[64];
    snprintf(uri, sizeof uri, "team?size=64KiB&group=%lu", (unsigned long)getegid());
    make_table(uri);
    assert_int_equal(stat_of("team").st_mode & 07777, 0660);
    assert_int_equal(stat_of("team").st_gid, getegid());
    assert_int_equal(try_open("team"), TG_E_TRUST);
    snprintf(words, sizeof words, "group=%lu", (unsigned long)getegid());
    assert_says(words);
    assert_says("0660");
    assert_int_equal(try_open(uri), TG_OK);
    snprintf(uri, sizeof uri, "team?group=%lu", (unsigned long)getegid() + 1);
    assert_int_equal(try_open(uri), TG_E_TRUST);
}

/* Runs as another user; needs root. */
static int
as_user(uid_t user, gid_t group, tg_status (*what)(void))
{
    const pid_t pid = fork();
    if (pid == 0) {
        if (setgroups(1, &group) != 0 || setresgid(group, group, group) != 0 || setresuid(user, user, user) != 0)
            _exit(99);
        _exit(-(int)what());
    }
    return -child_end(pid);
}

static tg_status
open_plain(void)
{
    return try_open("users/table");
}

static tg_status
open_with_owner(void)
{
    return try_open("users/table?owner=12345");
}

static tg_status
open_with_group(void)
{
    return try_open("users/table?group=54321&owner=12345");
}

static tg_status
make_as_owner(void)
{
    return try_open("users/table?size=64KiB");
}

static tg_status
make_for_group(void)
{
    return try_open("users/table?size=64KiB&group=54321");
}

static tg_status
hit_thrice(void)
{
    tg_store *store;
    tg_limiter *limiter;
    const tg_limiter_options options = { .rules = tg_text_of("4/hour") };
    const char *uri = uri_of("users/table?group=54321&owner=12345+12346");
    tg_status status = tg_store_open(tg_text_of(uri), NULL, &store, NULL);
    if (status == TG_OK)
        status = tg_limiter_open(store, NULL, &options, &limiter, NULL);
    int admitted = 0;
    for (int i = 0; status == TG_OK && i < 3; i++)
        admitted += hit(limiter, "a");
    return status == TG_OK ? (tg_status)-admitted : (tg_status)-50;
}

static bool
users_possible(void)
{
    if (geteuid() != 0) {
        print_message("skipped: becoming other users needs root\n");
        return false;
    }
    return true;
}

static void
users_folder(mode_t mode)
{
    unlink(path_of("users/table"));
    mkdir(path_of("users"), 0700);
    assert_int_equal(chown(path_of("users"), 0, 54321), 0);
    assert_int_equal(chmod(path_of("users"), mode), 0);
    assert_int_equal(chmod(test_folder, 0755), 0);
}

static void
another_users_table_is_trusted_only_by_name(void **state)
{
    (void)state;
    if (!users_possible())
        skip();
    users_folder(01777); /* as /dev/shm: sticky, anybody may make files */
    assert_int_equal(as_user(12345, 12345, make_as_owner), TG_OK);
    assert_int_equal(stat_of("users/table").st_uid, 12345);
    assert_int_equal(try_open("users/table"), TG_E_TRUST); /* we are root: could open it, and do not */
    assert_says("user 12345");
    assert_says("owner=12345");
    assert_int_equal(open_with_owner(), TG_OK);
    assert_int_equal(as_user(12345, 12345, open_plain), TG_OK);
    assert_int_equal(as_user(12346, 12346, open_with_owner), TG_E_TRUST); /* mode 0600 */
}

static void
two_users_of_one_group_count_in_one_table(void **state)
{
    (void)state;
    if (!users_possible())
        skip();
    users_folder(02770); /* as /run/tidegate */
    assert_int_equal(as_user(12345, 54321, make_for_group), TG_OK);
    assert_int_equal(stat_of("users/table").st_mode & 07777, 0660);
    assert_int_equal(stat_of("users/table").st_gid, 54321);
    assert_int_equal(as_user(12346, 54321, open_plain), TG_E_TRUST);
    assert_int_equal(as_user(12346, 54321, open_with_group), TG_OK);
    assert_int_equal(as_user(12347, 12347, open_with_group), TG_E_SYSTEM); /* the folder is closed to it */
    assert_int_equal(as_user(12345, 54321, hit_thrice), -3);
    assert_int_equal(as_user(12346, 54321, hit_thrice), -1);
    assert_int_equal(as_user(0, 0, hit_thrice), 0);
}

static void
root_makes_a_table_for_the_owner_it_names(void **state)
{
    (void)state;
    if (!users_possible())
        skip();
    users_folder(0755);
    make_table("users/table?size=64KiB&owner=12345");
    assert_int_equal(stat_of("users/table").st_uid, 12345);
    assert_int_equal(as_user(12345, 12345, open_plain), TG_OK);
}

/* A user without rights on the holder's /proc entry still finds out that it died. */
static void
a_dead_holder_of_another_user_is_recovered(void **state)
{
    (void)state;
    if (!users_possible())
        skip();
    users_folder(02770);
    assert_int_equal(as_user(12345, 54321, make_for_group), TG_OK);
    die_at = "entry saved";
    const pid_t pid = fork();
    if (pid == 0) {
        const gid_t group = 54321;
        if (setgroups(1, &group) != 0 || setresgid(group, group, group) != 0 || setresuid(12345, 12345, 12345) != 0)
            _exit(99);
        tg__table_hook = die_there;
        hit_thrice();
        _exit(98);
    }
    assert_int_equal(child_end(pid), -SIGKILL);
    assert_int_equal(as_user(12346, 54321, hit_thrice), -3);
    tg_map map = bytes_of(path_of("users/table"));
    uint64_t deaths = 0;
    for (uint32_t s = 0; s < map.segment_count; s++)
        deaths += tg__map_area(&map, s).segment->owner_deaths;
    munmap(map.base, map.bytes);
    assert_int_equal(deaths, 1);
}

/* ---- replaced while in use ---- */

static bool
took_notice(const char *code)
{
    bool found = false;
    tg_notice notice;
    while (tg_notice_take(&notice))
        found = found || strcmp(notice.code, code) == 0;
    return found;
}

static void
a_removed_or_replaced_file_is_followed_within_a_second_and_said_once(void **state)
{
    (void)state;
    unlink(path_of("moved"));
    took_notice("");
    tg_store *store = store_of(uri_of("moved?size=64KiB"), NULL);
    tg_limiter *limiter = limiter_of(store, "3/hour");
    for (int i = 0; i < 3; i++)
        assert_true(hit(limiter, "a"));
    assert_false(hit(limiter, "a"));
    unlink(path_of("moved"));
    sleep_us(SECOND + 50000);
    hit(limiter, "a"); /* finds out */
    assert_true(took_notice("table-replaced"));
    assert_int_equal(access(path_of("moved"), F_OK), 0);
    assert_true(hit(limiter, "a"));
    assert_int_equal(remaining(limiter, "a"), 2);
    /* A successor of another kind is not used; the old one goes on, and that is said once. */
    unlink(path_of("moved"));
    const int fd = open(path_of("moved"), O_CREAT | O_WRONLY, 0600);
    assert_int_equal(write(fd, "no table", 8), 8);
    close(fd);
    sleep_us(SECOND + 50000);
    assert_true(hit(limiter, "a"));
    assert_true(took_notice("table-replaced"));
    sleep_us(SECOND + 50000);
    assert_true(hit(limiter, "a"));
    assert_false(took_notice("table-replaced"));
    assert_false(hit(limiter, "a"));
    tg_limiter_close(limiter);
    tg_store_close(store);
}

/* R163, and design.md: no file descriptor is kept, none is lost. */
static void
an_open_table_holds_no_descriptor(void **state)
{
    (void)state;
    const int lowest = dup(0);
    close(lowest);
    for (int i = 0; i < 50; i++) {
        try_open("fd?size=64KiB");
        try_open("fd?size=128KiB");
        try_open("no-such-folder/fd");
    }
    tg_store *store = store_of(uri_of("fd"), NULL);
    const int now = dup(0);
    close(now);
    assert_int_equal(now, lowest);
    tg_store_close(store);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_wrong_uri_is_refused_with_what_was_expected),
        cmocka_unit_test(every_size_has_room_for_entries_and_logs),
        cmocka_unit_test(a_named_table_lies_in_the_runtime_folder_under_a_name_with_its_layout),
        cmocka_unit_test(a_new_table_is_whole_private_and_leaves_nothing_beside_it),
        cmocka_unit_test(where_there_are_no_nameless_files_the_temporary_one_goes_away),
        cmocka_unit_test(a_death_while_making_leaves_no_half_table),
        cmocka_unit_test(processes_that_open_at_once_get_one_table),
        cmocka_unit_test(a_full_disk_leaves_nothing_behind_and_says_how_much_was_wanted),
        cmocka_unit_test(another_size_is_refused_and_none_takes_what_is_there),
        cmocka_unit_test(a_foreign_older_or_damaged_file_is_refused_with_its_path_and_the_remedy),
        cmocka_unit_test(a_table_of_another_boot_is_made_anew),
        cmocka_unit_test(the_same_boot_keeps_what_was_counted),
        cmocka_unit_test(another_time_namespace_is_refused),
        cmocka_unit_test(a_manual_clock_and_the_real_one_never_share_a_table),
        cmocka_unit_test(links_folders_and_pipes_are_no_tables),
        cmocka_unit_test(a_table_that_everybody_can_write_is_not_trusted),
        cmocka_unit_test(a_group_may_write_only_where_it_is_named),
        cmocka_unit_test(another_users_table_is_trusted_only_by_name),
        cmocka_unit_test(two_users_of_one_group_count_in_one_table),
        cmocka_unit_test(root_makes_a_table_for_the_owner_it_names),
        cmocka_unit_test(a_dead_holder_of_another_user_is_recovered),
        cmocka_unit_test(a_removed_or_replaced_file_is_followed_within_a_second_and_said_once),
        cmocka_unit_test(an_open_table_holds_no_descriptor),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
