/* Errors: one shape for all failures, filled where they happen. */
#include "base/base.h"

#include <stdio.h>

const char *
tg_status_name(tg_status status)
{
    switch (status) {
#define TG_STATUS_NAME(name, value, text)                                                                              \
    case name:                                                                                                         \
        return #name;
        TG_STATUSES(TG_STATUS_NAME)
#undef TG_STATUS_NAME
    }
    return "TG_E_UNKNOWN";
}

const char *
tg_status_text(tg_status status)
{
    switch (status) {
#define TG_STATUS_TEXT(name, value, text)                                                                              \
    case name:                                                                                                         \
        return text;
        TG_STATUSES(TG_STATUS_TEXT)
#undef TG_STATUS_TEXT
    }
    return "not a status of tidegate";
}

static void
begin(tg_error *error, tg_status status, int system_error)
{
    *error = (tg_error){ .status = status, .system_error = system_error };
}

tg_status
tg__error(tg_error *error, tg_status status, const char *format, ...)
{
    if (!error)
        return status;
    begin(error, status, 0);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return status;
}

/* Safe among threads, which strerror is not. The GNU function returns the text, that of POSIX fills the room. */
static const char *
system_text(int system_error, char *room, size_t size)
{
#ifdef __GLIBC__
    return strerror_r(system_error, room, size);
#else
    return strerror_r(system_error, room, size) == 0 ? room : "unknown error";
#endif
}

tg_status
tg__error_system(tg_error *error, tg_status status, int system_error, const char *format, ...)
{
    if (!error)
        return status;
    begin(error, status, system_error);
    va_list arguments;
    va_start(arguments, format);
    const int written = vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    if (written >= 0 && (size_t)written < sizeof error->message) {
        char text[128];
        snprintf(error->message + written, sizeof error->message - (size_t)written, ": %s",
                 system_text(system_error, text, sizeof text));
    }
    return status;
}
