/* Compiled rules as bytes, and back.
 *
 *   head       "TGRULES" 0, version, counts of files, variables and nodes, bytes of the blob (4 bytes each), digest (16)
 *   files      path and text (offset and length in the blob), five marks (8 bytes each), its first node
 *   variables  name and value
 *   nodes      each tree in preorder: kind, plain, begin and end in the file's text, value, how many children follow
 *   blob       texts, each with a NUL behind it
 *
 * Little-endian. A value that stands in its file's text as it is points there. The digest is of all behind it: it finds
 * damage, not malice, so everything is bounded all the same. */
#include "config/compiled.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static const char MAGIC[8] = "TGRULES";

enum {
    VERSION = 1,
    DIGEST_AT = 8 + 5 * 4,
    DIGEST_BYTES = 16,
    HEAD_BYTES = DIGEST_AT + DIGEST_BYTES,
    FILE_BYTES = 4 * 4 + TG_MARKS * 8 + 4,
    VARIABLE_BYTES = 4 * 4,
    NODE_BYTES = 6 * 4
};

/* ---- writing ---- */

static void
put(tg_bytes *bytes, const void *data, size_t length)
{
    if (bytes->failed || length > 2 * (size_t)TG_COMPILED_BYTES_MAX - bytes->length) {
        bytes->failed = true;
        return;
    }
    if (bytes->room - bytes->length < length) {
        const size_t room = 2 * (bytes->length + length) + 4096;
        char *larger = realloc(bytes->data, room);
        if (!larger) {
            bytes->failed = true;
            return;
        }
        bytes->data = larger;
        bytes->room = room;
    }
    if (length)
        memcpy(bytes->data + bytes->length, data, length);
    bytes->length += length;
}

static void
put_number(tg_bytes *bytes, uint64_t number, size_t width)
{
    uint8_t written[8];
    for (size_t i = 0; i < width; i++)
        written[i] = (uint8_t)(number >> (8 * i));
    put(bytes, written, width);
}

static size_t
put_blob(tg_recording *recording, tg_text text)
{
    const size_t at = recording->blob.length;
    put(&recording->blob, text.data, text.length);
    put(&recording->blob, "", 1);
    return at;
}

static void
put_text(tg_bytes *bytes, size_t at, size_t length)
{
    put_number(bytes, at, 4);
    put_number(bytes, length, 4);
}

static void
record_node(tg_recording *recording, const tg_source *source, size_t text_at, const tg_node *node)
{
    size_t at = 0;
    if (node->kind == TG_NODE_SCALAR) {
        const size_t start = node->at + (node->plain ? 0 : 1);
        const bool as_written = start <= source->text.length && node->text.length <= source->text.length - start &&
                                (node->text.length == 0 ||
                                 memcmp(source->text.data + start, node->text.data, node->text.length) == 0);
        at = as_written ? text_at + start : put_blob(recording, node->text);
    }
    put_number(&recording->nodes, (uint64_t)node->kind | (uint64_t)node->plain << 8, 4);
    put_number(&recording->nodes, node->at, 4);
    put_number(&recording->nodes, node->end, 4);
    put_text(&recording->nodes, at, node->text.length);
    put_number(&recording->nodes, node->count, 4);
    recording->node_count++;
    for (const tg_node *child = node->first; child; child = child->next) /* no deeper than TG_CONFIG_DEPTH_MAX */
        record_node(recording, source, text_at, child);
}

void
tg__record_file(tg_recording *recording, const tg_source *source, const uint64_t mark[TG_MARKS], const tg_node *root)
{
    const tg_text path = tg_text_of(source->path);
    const size_t path_at = put_blob(recording, path), text_at = put_blob(recording, source->text);
    put_text(&recording->files, path_at, path.length);
    put_text(&recording->files, text_at, source->text.length);
    for (size_t i = 0; i < TG_MARKS; i++)
        put_number(&recording->files, mark[i], 8);
    put_number(&recording->files, root ? recording->node_count : UINT32_MAX, 4);
    recording->file_count++;
    if (root)
        record_node(recording, source, text_at, root);
}

bool
tg__record_variable(tg_recording *recording, const char *name, const char *value)
{
    if (recording->variable_count == TG_COMPILED_VARIABLES_MAX)
        return false;
    const size_t name_at = put_blob(recording, tg_text_of(name)), value_at = put_blob(recording, tg_text_of(value));
    put_text(&recording->variables, name_at, strlen(name));
    put_text(&recording->variables, value_at, strlen(value));
    recording->variable_count++;
    return true;
}

tg_status
tg__recording_write(tg_recording *recording, const char *path, tg_bytes *written, tg_error *error)
{
    static const uint8_t no_digest[DIGEST_BYTES] = { 0 };
    const tg_bytes *parts[] = { &recording->files, &recording->variables, &recording->nodes, &recording->blob };
    size_t length = HEAD_BYTES;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        length += parts[i]->length;
    if (length > TG_COMPILED_BYTES_MAX)
        return tg__error(error, TG_E_CONFIG, "%s: compiled it would take more than %u bytes", path, TG_COMPILED_BYTES_MAX);
    put(written, MAGIC, sizeof MAGIC);
    put_number(written, VERSION, 4);
    put_number(written, recording->file_count, 4);
    put_number(written, recording->variable_count, 4);
    put_number(written, recording->node_count, 4);
    put_number(written, recording->blob.length, 4);
    put(written, no_digest, sizeof no_digest);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        put(written, parts[i]->data, parts[i]->length);
        written->failed |= parts[i]->failed;
    }
    if (written->failed)
        return tg__error(error, TG_E_NOMEM, "%s: out of memory while compiling", path);
    const tg_text rest[] = { { written->data, DIGEST_AT },
                             { written->data + HEAD_BYTES, written->length - HEAD_BYTES } };
    tg__digest(rest, 2, (uint8_t *)written->data + DIGEST_AT, DIGEST_BYTES);
    return TG_OK;
}

void
tg__recording_fini(tg_recording *recording)
{
    free(recording->files.data);
    free(recording->variables.data);
    free(recording->nodes.data);
    free(recording->blob.data);
}

/* ---- reading ---- */

static uint64_t
get_number(const char *at, size_t width)
{
    uint64_t number = 0;
    for (size_t i = 0; i < width; i++)
        number |= (uint64_t)(uint8_t)at[i] << (8 * i);
    return number;
}

static tg_status
damaged(const tg_compiled *compiled, const char *what, tg_error *error)
{
    return tg__error(error, TG_E_CONFIG, "%s: these compiled rules are damaged (%s): compile them again", compiled->path,
                     what);
}

bool
tg__is_compiled(tg_text bytes)
{
    return bytes.length >= sizeof MAGIC && memcmp(bytes.data, MAGIC, sizeof MAGIC) == 0;
}

/* A text that lies in the blob whole, and, where it is to be a name, ends at its NUL. */
static bool
get_text(const tg_compiled *compiled, const char *at, bool terminated, tg_text *text)
{
    const size_t begin = get_number(at, 4), length = get_number(at + 4, 4);
    if (begin > compiled->blob.length || length > compiled->blob.length - begin)
        return false;
    *text = (tg_text){ compiled->blob.data + begin, length };
    return !terminated || (length < compiled->blob.length - begin && text->data[length] == '\0' &&
                           (length == 0 || !memchr(text->data, '\0', length)));
}

static tg_status
read_head(tg_text bytes, tg_compiled *compiled, tg_error *error)
{
    if (bytes.length < HEAD_BYTES)
        return damaged(compiled, "cut off in its head", error);
    const uint64_t version = get_number(bytes.data + 8, 4);
    if (version != VERSION)
        return tg__error(error, TG_E_CONFIG, "%s: compiled rules of version %u, expected %d: compile them again with the "
                                             "tidegate of this version",
                         compiled->path, (unsigned)version, VERSION);
    compiled->file_count = get_number(bytes.data + 12, 4);
    compiled->variable_count = get_number(bytes.data + 16, 4);
    compiled->node_count = get_number(bytes.data + 20, 4);
    const uint64_t blob_bytes = get_number(bytes.data + 24, 4);
    if (compiled->file_count == 0 || compiled->file_count > TG_CONFIG_FILES_MAX ||
        compiled->variable_count > TG_COMPILED_VARIABLES_MAX)
        return damaged(compiled, "its head counts what cannot be", error);
    const uint64_t expected = HEAD_BYTES + compiled->file_count * FILE_BYTES + compiled->variable_count * VARIABLE_BYTES +
                              (uint64_t)compiled->node_count * NODE_BYTES + blob_bytes;
    if (bytes.length != expected)
        return damaged(compiled, bytes.length < expected ? "cut off" : "longer than its head says", error);
    uint8_t digest[DIGEST_BYTES];
    const tg_text rest[] = { { bytes.data, DIGEST_AT }, { bytes.data + HEAD_BYTES, bytes.length - HEAD_BYTES } };
    tg__digest(rest, 2, digest, sizeof digest);
    if (memcmp(digest, bytes.data + DIGEST_AT, sizeof digest) != 0)
        return damaged(compiled, "its digest is another", error);
    return TG_OK;
}

tg_status
tg__compiled_open(tg_text bytes, const char *path, tg_compiled *compiled, tg_error *error)
{
    *compiled = (tg_compiled){ .path = path };
    const tg_status status = read_head(bytes, compiled, error);
    if (status != TG_OK)
        return status;
    const char *at = bytes.data + HEAD_BYTES;
    const char *files = at;
    at += compiled->file_count * FILE_BYTES;
    compiled->variables = (tg_text){ at, compiled->variable_count * VARIABLE_BYTES };
    at += compiled->variables.length;
    compiled->nodes = (tg_text){ at, compiled->node_count * NODE_BYTES };
    at += compiled->nodes.length;
    compiled->blob = (tg_text){ at, (size_t)(bytes.data + bytes.length - at) };
    for (size_t i = 0; i < compiled->file_count; i++, files += FILE_BYTES) {
        struct tg_compiled_file *file = &compiled->files[i];
        if (!get_text(compiled, files, true, &file->path) || file->path.length == 0 ||
            !get_text(compiled, files + 8, false, &file->text) || file->text.length > TG_CONFIG_BYTES_MAX)
            return damaged(compiled, "a source's name or text lies outside of it", error);
        for (size_t k = 0; k < TG_MARKS; k++)
            file->mark[k] = get_number(files + 16 + 8 * k, 8);
        const uint64_t node = get_number(files + 16 + 8 * TG_MARKS, 4);
        file->node = node == UINT32_MAX ? SIZE_MAX : (size_t)node;
    }
    for (size_t i = 0; i < 2 * compiled->variable_count; i++) {
        tg_text text;
        if (!get_text(compiled, compiled->variables.data + 8 * i, true, &text))
            return damaged(compiled, "a variable lies outside of it", error);
    }
    return TG_OK;
}

static bool
get_node(const tg_compiled *compiled, size_t index, const struct tg_compiled_file *file, tg_node *node, tg_text *value)
{
    const char *at = compiled->nodes.data + index * NODE_BYTES;
    const uint64_t kind = get_number(at, 4);
    *node = (tg_node){ .kind = (tg_node_kind)(kind & 0xff), .plain = kind >> 8 & 1, .at = get_number(at + 4, 4),
                       .end = get_number(at + 8, 4), .count = get_number(at + 20, 4) };
    return (kind & 0xff) <= TG_NODE_MAP && kind >> 9 == 0 && node->at <= node->end && node->end <= file->text.length &&
           get_text(compiled, at + 12, false, value) && (node->kind != TG_NODE_SCALAR || node->count == 0) &&
           (node->kind == TG_NODE_SCALAR || value->length == 0);
}

tg_status
tg__compiled_tree(const tg_compiled *compiled, size_t file, tg_arena *arena, tg_node **root, tg_error *error)
{
    struct {
        tg_node *container, *last;
        size_t taken, wanted;
    } levels[TG_CONFIG_DEPTH_MAX];
    size_t depth = 0, index = compiled->files[file].node;
    *root = NULL;
    if (index == SIZE_MAX)
        return TG_OK;
    do {
        tg_text value;
        tg_node *node = tg__arena_take(arena, sizeof *node);
        if (!node)
            return tg__error(error, TG_E_NOMEM, "%s: out of memory while reading", compiled->path);
        if (index >= compiled->node_count || !get_node(compiled, index++, &compiled->files[file], node, &value))
            return damaged(compiled, "a value that cannot be", error);
        if (node->kind == TG_NODE_SCALAR) {
            node->text = (tg_text){ tg__arena_copy(arena, value), value.length };
            if (!node->text.data)
                return tg__error(error, TG_E_NOMEM, "%s: out of memory while reading", compiled->path);
        }
        if (depth == 0) {
            *root = node;
        } else {
            tg_node *in = levels[depth - 1].container;
            if (in->kind == TG_NODE_MAP && levels[depth - 1].taken % 2 == 0 && node->kind != TG_NODE_SCALAR)
                return damaged(compiled, "a key that is no word", error);
            if (levels[depth - 1].last)
                levels[depth - 1].last->next = node;
            else
                in->first = node;
            levels[depth - 1].last = node;
            levels[depth - 1].taken++;
        }
        if (node->count > 0) {
            if (depth == TG_CONFIG_DEPTH_MAX)
                return damaged(compiled, "values too deep in each other", error);
            levels[depth].container = node;
            levels[depth].last = NULL;
            levels[depth].taken = 0;
            levels[depth++].wanted = node->kind == TG_NODE_MAP ? 2 * node->count : node->count;
        }
        while (depth > 0 && levels[depth - 1].taken == levels[depth - 1].wanted)
            depth--;
    } while (depth > 0);
    return TG_OK;
}

tg_text
tg__compiled_variable(const tg_compiled *compiled, const char *name)
{
    for (size_t i = 0; i < compiled->variable_count; i++) {
        tg_text found, value;
        if (get_text(compiled, compiled->variables.data + i * VARIABLE_BYTES, true, &found) && tg__text_is(found, name) &&
            get_text(compiled, compiled->variables.data + i * VARIABLE_BYTES + 8, true, &value))
            return value;
    }
    return (tg_text){ NULL, 0 };
}

/* ---- whether it is of today ---- */

/* By the text: a file that was copied, touched or restored is still the same. */
static bool
same_text(const struct tg_compiled_file *file)
{
    char piece[8192];
    size_t at = 0;
    const int fd = open(file->path.data, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd == -1)
        return true;
    for (;;) {
        const ssize_t got = read(fd, piece, sizeof piece);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            close(fd);
            return got < 0 || at == file->text.length;
        }
        if ((size_t)got > file->text.length - at || memcmp(piece, file->text.data + at, (size_t)got) != 0) {
            close(fd);
            return false;
        }
        at += (size_t)got;
    }
}

bool
tg__compiled_changed(const tg_compiled *compiled, char *what, size_t what_bytes)
{
    for (size_t i = 0; i < compiled->file_count; i++) {
        const struct tg_compiled_file *file = &compiled->files[i];
        struct stat found;
        uint64_t mark[TG_MARKS];
        if (stat(file->path.data, &found) == -1)
            continue;
        tg__config_mark(&found, mark);
        if (memcmp(mark, file->mark, sizeof mark) == 0 || !S_ISREG(found.st_mode) || same_text(file))
            continue;
        snprintf(what, what_bytes, "%s", file->path.data);
        return true;
    }
    for (size_t i = 0; i < compiled->variable_count; i++) {
        tg_text name;
        if (!get_text(compiled, compiled->variables.data + i * VARIABLE_BYTES, true, &name))
            continue;
        const char *value = getenv(name.data);
        if (!value || tg__text_is(tg__compiled_variable(compiled, name.data), value))
            continue;
        snprintf(what, what_bytes, "the variable %s", name.data);
        return true;
    }
    return false;
}
