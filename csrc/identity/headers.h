/* Finding header lines by name.
 * Must not enter: what a header means. */
#ifndef TG_HEADERS_H
#define TG_HEADERS_H

#include "base/base.h"

/* A header's name as it is looked for: lower case, '_' as '-'. */
typedef struct tg_header_name {
    char text[TG_NAME_BYTES_MAX + 1];
    size_t length;
} tg_header_name;

/* false: empty, too long, or not a token of RFC 9110 5.6.2. */
bool tg__header_name(tg_text written, tg_header_name *name);

/* Lines of one name. Where a line is spelt with '-', lines of the same name spelt with '_' do not count: a client can
 * send "X_Forwarded_For" past a proxy that guards only "X-Forwarded-For", and a server that maps one to the other
 * (CGI) knows only the '_' spelling anyway. */
typedef struct tg_header_lines {
    const tg_request *request;
    const tg_header_name *name;
    size_t left;  /* lines not yet looked at, from the end */
    int spelling; /* 0: none found */
} tg_header_lines;

tg_header_lines tg__header_lines(const tg_request *request, const tg_header_name *name);
/* The lines from the last to the first. false: no further one. */
bool tg__header_previous(tg_header_lines *lines, tg_text *value);
/* The value of a header that may be sent once only, trimmed. false: absent, empty, or sent twice. */
bool tg__header_single(const tg_request *request, const tg_header_name *name, tg_text *value);

/* Has the face read what is needed of it (TG_READ_ bits), where it has left that for later. Once, before a request is
 * judged. */
tg_status tg__request_read_now(const tg_request *request, unsigned needed, tg_error *error);

static inline tg_status
tg__request_read(const tg_request *request, unsigned needed, tg_error *error)
{
    return request->unread ? tg__request_read_now(request, needed, error) : TG_OK;
}

#endif
