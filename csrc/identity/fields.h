/* Values that clients put into queries, cookies, forms and JSON, found by name as the frameworks behind us read them.
 * Must not enter: what a value is counted for.
 *
 * A name that is there twice is invalid: one framework takes the first, the next the last, and a client could be counted
 * as one and served as the other. So is a value that is empty or longer than TG_VALUE_BYTES_MAX, and a body that is not
 * of the declared type, not well-formed, or longer than we look at. Invalid is the same as missing. */
#ifndef TG_FIELDS_H
#define TG_FIELDS_H

#include "base/base.h"

#define TG_VALUE_BYTES_MAX 512

/* Decoded values are written to `room`; *value then points there. false: missing. */
bool tg__query_value(const tg_request *request, tg_text name, char room[TG_VALUE_BYTES_MAX], tg_text *value);
bool tg__query_has(const tg_request *request, tg_text name); /* once or several times */
bool tg__cookie_value(const tg_request *request, tg_text name, tg_text *value);
/* application/x-www-form-urlencoded and multipart/form-data */
bool tg__form_value(const tg_request *request, tg_text name, char room[TG_VALUE_BYTES_MAX], tg_text *value);
/* A member of the outermost object, or of one inside it: "user.id". Texts as they are, whole numbers and true, false as
 * written; other numbers have several spellings and count as missing. */
bool tg__json_value(const tg_request *request, tg_text path, char room[TG_VALUE_BYTES_MAX], tg_text *value);
/* The key of X-Api-Key, else of Authorization with the scheme Bearer, Token or ApiKey. Its digest, never the key itself. */
#define TG_DIGEST_BYTES 32
bool tg__api_key(const tg_request *request, uint8_t digest[TG_DIGEST_BYTES]);
/* The digest of an address and the headers by which browsers differ. */
void tg__fingerprint(const tg_request *request, tg_text address, uint8_t digest[TG_DIGEST_BYTES]);

#endif
