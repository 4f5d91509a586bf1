/* What a run of tidegate-cgi is told: by the web server's variables, or by the script that names it as its interpreter.
 * Must not enter: decisions, answers. */
#ifndef TIDEGATE_CGI_SETTINGS_H
#define TIDEGATE_CGI_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CGI_SCRIPT_BYTES_MAX 4096u

typedef struct cgi_settings {
    const char *program; /* what goes on where a request is allowed; NULL: the decision itself is the answer */
    bool enabled;
    uint64_t hold_us;    /* the longest that an allowed request waits for its turn before the program goes on */
    bool open_on_error;  /* let through when the rules cannot be read */
    bool is_script_filename_ours; /* the server was told to run us in the place of the program */
    bool is_nph;         /* the server does not look at what is answered, so the answer is a whole one */
    char wrong[256];     /* what cannot be meant; empty: nothing */
} cgi_settings;

/* Reads the environment, and, where the kernel started us for a `#!` line, the script, whose settings go into the
 * environment. Never the arguments: a server makes them of the client's query (RFC 3875 4.4). */
void cgi_settings_read(cgi_settings *settings);

/* The environment for the program: without what was said to us alone. */
void cgi_settings_clean(const cgi_settings *settings);

#endif
