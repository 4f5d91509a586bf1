/* The daemon's voice: one line an event on stderr, never waiting for whoever reads it.
 * Must not enter: decisions, sockets other than stderr. */
#ifndef TIDEGATE_FCGI_LOG_H
#define TIDEGATE_FCGI_LOG_H

#include <stdint.h>

/* Whose voice it is; "tidegate-fcgi" unless said otherwise before the first line. */
extern const char *fcgi_log_name;

typedef enum fcgi_level { FCGI_INFO, FCGI_WARN, FCGI_ERROR } fcgi_level;

/* "2026-01-31T12:00:00Z tidegate-fcgi: warn: CODE: message". Control characters become '?', so that a peer's bytes
 * never make a second line. A line that stderr cannot take at once is dropped, and the next one says how many
 * were: a log that nobody reads must not stop the answers. */
void fcgi_log(fcgi_level level, const char *code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* For what peers can cause as often as they like: one line a second and occasion, with the number left out since. */
typedef struct fcgi_log_gate {
    uint64_t quiet_until_us;
    uint64_t suppressed;
} fcgi_log_gate;

void fcgi_log_rarely(fcgi_log_gate *gate, fcgi_level level, const char *code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif
