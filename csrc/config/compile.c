/* tidegate compile: a rules file read once, and what came of it put in place whole.
 * Must not enter: what stands in the bytes (compiled.c), what keys mean. */
#include "config/compiled.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* Sources are looked for by whoever reads it, wherever he stands. Symbolic links stay as they are: a link to today's
 * release is what changes. */
static tg_status
absolute(const char *path, char **whole, tg_error *error)
{
    char *here = path[0] == '/' ? strdup("") : getcwd(NULL, 0);
    *whole = NULL;
    if (here && asprintf(whole, "%s%s%s", here, path[0] == '/' ? "" : "/", path) == -1)
        *whole = NULL;
    free(here);
    return *whole ? TG_OK : tg__error_system(error, TG_E_SYSTEM, errno, "%s: where it lies cannot be told", path);
}

/* Who may read the rules may read them compiled; where a variable's value went in, others may not. */
static tg_status
write_whole(const char *path, const char *source, const tg_bytes *bytes, bool secret, tg_error *error)
{
    char *made = NULL;
    struct stat like;
    size_t at = 0;
    int fd = -1;
    if (asprintf(&made, "%s.XXXXXX", path) == -1)
        return tg__error(error, TG_E_NOMEM, "%s: out of memory", path);
    tg_status status = TG_OK;
    fd = mkostemp(made, O_CLOEXEC);
    if (fd == -1) {
        free(made);
        return tg__error_system(error, TG_E_SYSTEM, errno, "%s: cannot be written", path);
    }
    if (stat(source, &like) == -1)
        like = (struct stat){ .st_mode = 0600, .st_gid = (gid_t)-1 };
    const bool grouped = fchown(fd, (uid_t)-1, like.st_gid) == 0;
    const mode_t kept = like.st_mode & (secret ? 0640 : 0644) & (grouped ? 0644 : 0604);
    while (status == TG_OK && at < bytes->length) {
        const ssize_t put = write(fd, bytes->data + at, bytes->length - at);
        if (put >= 0)
            at += (size_t)put;
        else if (errno != EINTR)
            status = tg__error_system(error, TG_E_SYSTEM, errno, "%s: cannot be written", path);
    }
    if (status == TG_OK && (fchmod(fd, kept | 0600) == -1 || fsync(fd) == -1))
        status = tg__error_system(error, TG_E_SYSTEM, errno, "%s: cannot be written", path);
    if (close(fd) == -1 && status == TG_OK)
        status = tg__error_system(error, TG_E_SYSTEM, errno, "%s: cannot be written", path);
    if (status == TG_OK && rename(made, path) == -1)
        status = tg__error_system(error, TG_E_SYSTEM, errno, "%s: cannot be put in place", path);
    if (status != TG_OK)
        unlink(made);
    free(made);
    return status;
}

tg_status
tg_rules_compile(const char *path, const char *output, tg_error *error)
{
    tg_recording recording = { .file_count = 0 };
    tg_bytes written = { 0 };
    tg_config *config = NULL;
    char *whole = NULL;
    tg_status status = tg__digest_init(error);
    if (status == TG_OK)
        status = absolute(path, &whole, error);
    if (status == TG_OK)
        status = tg__config_record(whole, &recording, &config, error);
    if (status == TG_OK)
        status = tg__recording_write(&recording, path, &written, error);
    if (status == TG_OK)
        status = write_whole(output, whole, &written, recording.variable_count > 0, error);
    tg__config_close(config);
    tg__recording_fini(&recording);
    free(written.data);
    free(whole);
    return status;
}

tg_status
tg_rules_changed(const char *path, bool *changed, char *what, size_t what_bytes, tg_error *error)
{
    char *text = NULL;
    size_t length = 0;
    uint64_t mark[TG_MARKS];
    tg_compiled compiled;
    tg_status status = tg__digest_init(error);
    if (status == TG_OK)
        status = tg__config_text(path, &text, &length, mark, error);
    if (status == TG_OK && !tg__is_compiled((tg_text){ text, length }))
        status = tg__error(error, TG_E_CONFIG, "%s: found no compiled rules", path);
    if (status == TG_OK)
        status = tg__compiled_open((tg_text){ text, length }, path, &compiled, error);
    if (status == TG_OK)
        *changed = tg__compiled_changed(&compiled, what, what_bytes);
    free(text);
    return status;
}
