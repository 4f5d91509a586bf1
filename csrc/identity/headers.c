/* Finding header lines by name.
 * Must not enter: what a header means. */
#include "identity/headers.h"

#include "identity/identity.h"

#include <stdatomic.h>

enum { SPELT_OTHERWISE, SPELT_WITH_UNDERSCORE, SPELT_SO };

static char
lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c | 0x20) : c;
}

bool
tg__header_name(tg_text written, tg_header_name *name)
{
    if (written.length == 0 || written.length > TG_NAME_BYTES_MAX)
        return false;
    for (size_t i = 0; i < written.length; i++) {
        const char c = lower(written.data[i]);
        const bool token = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || (c && strchr("!#$%&'*+-.^_`|~", c));
        if (!token)
            return false;
        name->text[i] = c == '_' ? '-' : c;
    }
    name->text[written.length] = '\0';
    name->length = written.length;
    return true;
}

static int
spelling(tg_text found, const tg_header_name *name)
{
    if (found.length != name->length)
        return SPELT_OTHERWISE;
    int how = SPELT_SO;
    for (size_t i = 0; i < found.length; i++) {
        const char c = lower(found.data[i]);
        if (c == name->text[i])
            continue;
        if (c != '_' || name->text[i] != '-')
            return SPELT_OTHERWISE;
        how = SPELT_WITH_UNDERSCORE;
    }
    return how;
}

bool
tg__header_is(tg_text name, const char *wanted)
{
    for (size_t i = 0; i < name.length; i++) {
        const char a = name.data[i] == '_' ? '-' : lower(name.data[i]);
        if (wanted[i] == '\0' || a != (wanted[i] == '_' ? '-' : lower(wanted[i])))
            return false;
    }
    return wanted[name.length] == '\0';
}

tg_header_lines
tg__header_lines(const tg_request *request, const tg_header_name *name)
{
    tg_header_lines lines = { request, name, request->header_count, SPELT_OTHERWISE };
    for (size_t i = 0; i < request->header_count && lines.spelling != SPELT_SO; i++) {
        const int how = spelling(request->headers[i].name, name);
        if (how > lines.spelling)
            lines.spelling = how;
    }
    return lines;
}

bool
tg__header_previous(tg_header_lines *lines, tg_text *value)
{
    if (lines->spelling == SPELT_OTHERWISE)
        return false;
    while (lines->left > 0) {
        const tg_header *header = &lines->request->headers[--lines->left];
        if (spelling(header->name, lines->name) == lines->spelling) {
            *value = header->value;
            return true;
        }
    }
    return false;
}

bool
tg__header_single(const tg_request *request, const tg_header_name *name, tg_text *value)
{
    tg_header_lines lines = tg__header_lines(request, name);
    tg_text second;
    if (!tg__header_previous(&lines, value) || tg__header_previous(&lines, &second))
        return false;
    *value = tg__text_trim(*value);
    return value->length > 0;
}

/* ---- what is read late ---- */

enum { LOOKED_AT_FIRST = 64, LOOKED_AT_EACH = 64 };

/* A proxy that nobody has named is told of when its header is seen (client.c). It sends that with each request, so a look
 * at some of them finds it. */
static bool
is_looked_at(void)
{
    static atomic_uint asked; /* two threads may count one request: nothing hangs on it */
    const unsigned number = atomic_load_explicit(&asked, memory_order_relaxed);
    atomic_store_explicit(&asked, number + 1, memory_order_relaxed);
    return number < LOOKED_AT_FIRST || number % LOOKED_AT_EACH == 0;
}

tg_status
tg__request_read_now(const tg_request *request, unsigned needed, tg_error *error)
{
    if (tg__text_is(request->method, "OPTIONS")) /* by its headers a preflight is known */
        needed |= TG_READ_HEADERS;
    const bool glances = is_looked_at() && !(needed & TG_READ_HEADERS) && (request->unread & TG_READ_HEADERS);
    needed &= request->unread;
    if (glances)
        needed |= TG_READ_HEADERS | TG_READ_GLANCE;
    return needed ? request->read(request->reading, needed, error) : TG_OK;
}
