/* From an ASGI scope or a WSGI environ to a tg_request, without copying what can be borrowed.
 * Must not enter: deciding who the client is. What the server said is handed on; csrc/identity/ judges it.
 *
 * Everything that can run Python code (a user object's properties, a mapping that is no dict, an iterable of headers) comes
 * first; what it gave is held. After that only bytes are read, so nothing borrowed can change under us.
 * Headers and path of a scope are read when the judging asks for them: most limits need neither. */
#include "ext.h"

#include <string.h>

static void
request_init(tgpy_request *request)
{
    request->request = (tg_request){ .header_count = 0 };
    request->headers = request->inlined;
    request->header_room = TGPY_HEADERS_INLINE;
    request->held_count = 0;
    request->overflow = NULL;
    request->path = NULL;
    request->unjudged = false;
}

TGPY_HOT void
tgpy_request_fini(tgpy_request *request)
{
    for (size_t i = 0; i < request->held_count; i++)
        Py_DECREF(request->held[i]);
    Py_XDECREF(request->overflow);
    PyMem_Free(request->path);
    if (request->headers != request->inlined)
        PyMem_Free(request->headers);
}

/* Takes over a reference; NULL gives false. */
static inline bool
hold(tgpy_request *request, PyObject *object)
{
    if (!object)
        return false;
    if (request->held_count < TGPY_HELD_MAX) {
        request->held[request->held_count++] = object;
        return true;
    }
    if (!request->overflow)
        request->overflow = PyList_New(0);
    const bool done = request->overflow && PyList_Append(request->overflow, object) == 0;
    Py_DECREF(object);
    return done;
}

static TGPY_COLD bool
wrong_type(const char *what, const char *expected, PyObject *object)
{
    PyObject *type = PyErr_Occurred() ? NULL : PyType_GetName(Py_TYPE(object));
    if (type)
        PyErr_Format(PyExc_TypeError, "%s must be %s, not %U", what, expected, type);
    Py_XDECREF(type);
    return false;
}

/* The dict itself, or a copy of another mapping. Held. */
static PyObject *
dict_of(tgpy_request *request, PyObject *mapping, const char *what)
{
    if (PyDict_Check(mapping))
        return hold(request, Py_NewRef(mapping)) ? mapping : NULL;
    if (!PyMapping_Check(mapping) || PyUnicode_Check(mapping) || PyBytes_Check(mapping) || PyList_Check(mapping) ||
        PyTuple_Check(mapping)) {
        wrong_type(what, "a mapping", mapping);
        return NULL;
    }
    PyObject *dict = PyDict_New();
    if (dict && PyDict_Update(dict, mapping) != 0)
        Py_CLEAR(dict);
    return hold(request, dict) ? dict : NULL;
}

/* The value under a name, held; NULL where it is missing or None, or with an exception set. */
static TGPY_HOT PyObject *
lookup(const tgpy_state *state, tgpy_request *request, PyObject *dict, tgpy_name name)
{
    PyObject *value = PyDict_GetItemWithError(dict, state->names[name]);
    if (!value || value == Py_None)
        return NULL;
    return hold(request, Py_NewRef(value)) ? value : NULL;
}

/* A str as UTF-8, held. */
TGPY_HOT bool
tgpy_request_str(tgpy_request *request, PyObject *object, const char *what, tg_text *text)
{
    PyObject *made = NULL;
    if (!PyUnicode_Check(object))
        return wrong_type(what, "str", object);
    return tgpy_text(object, text, &made) && (!made || hold(request, made));
}

/* Most of what a request tells is plain ASCII, whose bytes a str lends at once. */
static inline bool
read_ascii(PyObject *object, tg_text *text)
{
    Py_ssize_t length = 0;
    if (!PyUnicode_CheckExact(object))
        return false;
    text->data = PyUnicode_AsUTF8AndSize(object, &length);
    text->length = (size_t)length;
    if (!text->data)
        PyErr_Clear();
    return text->data != NULL;
}

/* A WSGI str carries bytes, one a character (PEP 3333). */
static bool
read_native(tgpy_request *request, PyObject *object, const char *what, tg_text *text)
{
    if (!PyUnicode_Check(object))
        return wrong_type(what, "str", object);
    PyObject *made = NULL;
    if (!tgpy_text(object, text, &made))
        return false;
    if (!made && text->length == (size_t)PyUnicode_GetLength(object))
        return true; /* ASCII */
    Py_XDECREF(made);
    made = PyUnicode_AsLatin1String(object);
    if (!made) { /* not native: a test client's own str. Its UTF-8 then. */
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
            return false;
        PyErr_Clear();
        return tgpy_request_str(request, object, what, text);
    }
    if (!hold(request, made))
        return false;
    *text = (tg_text){ PyBytes_AsString(made), (size_t)PyBytes_Size(made) };
    return true;
}

static inline tg_header *
header_slot(tgpy_request *request)
{
    if (request->request.header_count == request->header_room) {
        const size_t room = 2 * request->header_room;
        tg_header *headers = PyMem_Malloc(room * sizeof *headers);
        if (!headers) {
            PyErr_NoMemory();
            return NULL;
        }
        memcpy(headers, request->headers, request->header_room * sizeof *headers);
        if (request->headers != request->inlined)
            PyMem_Free(request->headers);
        request->headers = headers;
        request->header_room = room;
    }
    return &request->headers[request->request.header_count++];
}

/* A path that a server has decoded is encoded again where its reader would decode or cut it a second time. */
static bool
encode_path(tgpy_request *request, tg_text prefix, tg_text decoded)
{
    static const char digits[] = "0123456789ABCDEF";
    const tg_text pieces[] = { prefix, decoded };
    char *to = PyMem_Malloc(3 * (prefix.length + decoded.length) + 1);
    if (!to) {
        PyErr_NoMemory();
        return false;
    }
    request->path = to;
    for (size_t piece = 0; piece < 2; piece++)
        for (size_t i = 0; i < pieces[piece].length; i++) {
            const unsigned char byte = (unsigned char)pieces[piece].data[i];
            if (byte == '%' || byte == '?' || byte == '#' || byte <= ' ' || byte >= 0x7F) {
                *to++ = '%';
                *to++ = digits[byte >> 4];
                *to++ = digits[byte & 15];
            } else {
                *to++ = (char)byte;
            }
        }
    request->request.path = (tg_text){ request->path, (size_t)(to - request->path) };
    return true;
}

/* A local socket has no address; servers say so in several ways. */
static TGPY_HOT tg_text
peer_of(tg_text given)
{
    if (given.length == 0 || given.data[0] == '/' || given.data[0] == '@' || given.data[0] == '\0' ||
        (given.length >= 5 && memcmp(given.data, "unix:", 5) == 0))
        return (tg_text){ "unix:", 5 };
    return given;
}

/* ---- ASGI ---- */

static PyObject *
attribute(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    /* starlette's BaseUser raises NotImplementedError for what a project did not define. */
    if (!value && (PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_NotImplementedError)))
        PyErr_Clear();
    return value;
}

/* Starlette's convention: scope["user"] with is_authenticated, then identity, else display_name. Anything else that stands
 * under "user" is no statement about who asks. */
static bool
read_scope_user(tgpy_state *state, tgpy_request *request, PyObject *user)
{
    PyObject *authenticated = attribute(user, state->names[NAME_is_authenticated]);
    if (!authenticated)
        return !PyErr_Occurred();
    const int yes = PyObject_IsTrue(authenticated);
    Py_DECREF(authenticated);
    if (yes <= 0)
        return yes == 0;
    static const tgpy_name names[] = { NAME_identity, NAME_display_name };
    for (size_t i = 0; i < 2; i++) {
        PyObject *name = attribute(user, state->names[names[i]]);
        if (!name && PyErr_Occurred())
            return false;
        if (name && PyLong_Check(name) && !PyBool_Check(name)) { /* a database's key */
            PyObject *text = PyObject_Str(name);
            Py_DECREF(name);
            name = text;
        }
        if (name && PyUnicode_Check(name) && PyUnicode_GetLength(name) > 0)
            return hold(request, name) && tgpy_request_str(request, name, "scope[\"user\"]", &request->request.user);
        Py_XDECREF(name);
    }
    return !PyErr_Occurred();
}

/* scope["client"]: [host, port], or None for a local socket. */
static TGPY_HOT bool
read_client(tgpy_request *request, PyObject *client)
{
    PyObject *host = NULL, *port = NULL;
    if (PyTuple_CheckExact(client) && Py_SIZE(client) == 2) { /* what every server gives */
        host = PyTuple_GetItem(client, 0);
        port = PyTuple_GetItem(client, 1);
    } else if (PyTuple_Check(client) && PyTuple_Size(client) >= 1) {
        host = PyTuple_GetItem(client, 0);
        port = PyTuple_Size(client) >= 2 ? PyTuple_GetItem(client, 1) : NULL;
    } else if (PyList_Check(client) && PyList_Size(client) >= 1) {
        host = PyList_GetItem(client, 0);
        port = PyList_Size(client) >= 2 ? PyList_GetItem(client, 1) : NULL;
    } else {
        return wrong_type("scope[\"client\"]", "(host, port) or None", client);
    }
    if (host == Py_None)
        return true;
    if (!PyUnicode_Check(host))
        return wrong_type("scope[\"client\"][0]", "str", host);
    tg_text text;
    if (!hold(request, Py_NewRef(host)) ||
        (!read_ascii(host, &text) && !tgpy_request_str(request, host, "scope[\"client\"][0]", &text)))
        return false;
    request->request.peer = peer_of(text);
    /* No connection comes from port 0. uvicorn writes it where it has put the client of X-Forwarded-For in the peer's
     * place; to walk the header again from there would believe what the client wrote. */
    if (port && PyLong_Check(port) && request->request.peer.data == text.data) {
        const long number = PyLong_AsLong(port);
        if (number == -1 && PyErr_Occurred())
            PyErr_Clear();
        request->request.client_resolved = number == 0;
    }
    return true;
}

/* Every header of every request passes here, and each question asked of the interpreter through the stable interface is a
 * call: exact types, which is what servers give, are told by their type pointer and measured by their object header. */
static bool
pair_of(PyObject *pair, PyObject **name, PyObject **value)
{
    if ((PyTuple_CheckExact(pair) && Py_SIZE(pair) == 2) || (PyTuple_Check(pair) && PyTuple_Size(pair) == 2)) {
        *name = PyTuple_GetItem(pair, 0);
        *value = PyTuple_GetItem(pair, 1);
        return true;
    }
    if (PyList_Check(pair) && PyList_Size(pair) == 2) {
        *name = PyList_GetItem(pair, 0);
        *value = PyList_GetItem(pair, 1);
        return true;
    }
    return false;
}

static inline bool
bytes_of(PyObject *object, tg_text *text)
{
    if (!PyBytes_CheckExact(object) && !PyBytes_Check(object))
        return false;
    *text = (tg_text){ PyBytes_AsString(object), (size_t)Py_SIZE(object) };
    return true;
}

static bool
read_pair(tgpy_request *request, PyObject *pair)
{
    PyObject *name, *value;
    tg_header *header = header_slot(request);
    if (!header)
        return false;
    if (!pair_of(pair, &name, &value))
        return wrong_type("each of scope[\"headers\"]", "a pair of bytes", pair);
    if (!bytes_of(name, &header->name))
        return wrong_type("the name of each of scope[\"headers\"]", "bytes", name);
    if (!bytes_of(value, &header->value))
        return wrong_type("the value of each of scope[\"headers\"]", "bytes", value);
    if (header->name.length == 4 && request->request.host.length == 0 &&
        (memcmp(header->name.data, "host", 4) == 0 || memcmp(header->name.data, "Host", 4) == 0))
        request->request.host = header->value;
    return true;
}

static bool
read_headers(tgpy_request *request, PyObject *headers)
{
    if (PyList_Check(headers)) {
        const Py_ssize_t count = PyList_Size(headers);
        for (Py_ssize_t i = 0; i < count; i++)
            if (!read_pair(request, PyList_GetItem(headers, i)))
                return false;
    } else {
        const Py_ssize_t count = PyTuple_Size(headers);
        for (Py_ssize_t i = 0; i < count; i++)
            if (!read_pair(request, PyTuple_GetItem(headers, i)))
                return false;
    }
    request->request.headers = request->headers;
    return true;
}

/* A list or tuple as it is, any other collection as a tuple. Held. */
static PyObject *
collection_of(tgpy_request *request, PyObject *headers)
{
    if (PyList_Check(headers) || PyTuple_Check(headers))
        return headers;
    if (PyIter_Check(headers) || PyUnicode_Check(headers) || PyBytes_Check(headers) || PyDict_Check(headers)) {
        /* A generator would be used up here and leave the application without headers. */
        wrong_type("scope[\"headers\"]", "a list of pairs of bytes", headers);
        return NULL;
    }
    PyObject *tuple = PySequence_Tuple(headers);
    if (!tuple && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        wrong_type("scope[\"headers\"]", "a list of pairs of bytes", headers);
    }
    return hold(request, tuple) ? tuple : NULL;
}

static bool
is_word(PyObject *object, PyObject *word)
{
    return object == word || (PyUnicode_Check(object) && PyUnicode_Compare(object, word) == 0);
}

static TGPY_HOT bool
read_given(tgpy_request *request, PyObject *route, PyObject *user)
{
    if (route && route != Py_None &&
        (!hold(request, Py_NewRef(route)) || !tgpy_request_str(request, route, "route", &request->request.route)))
        return false;
    return !user || user == Py_None ||
           (hold(request, Py_NewRef(user)) && tgpy_request_str(request, user, "user", &request->request.user));
}

static TGPY_HOT bool
read_target(const tgpy_state *state, tgpy_request *request, PyObject *dict)
{
    tg_request *to = &request->request;
    PyObject *found = lookup(state, request, dict, NAME_raw_path);
    if (found) { /* as the client sent it */
        if (!PyBytes_Check(found))
            return wrong_type("scope[\"raw_path\"]", "bytes or None", found);
        to->path = (tg_text){ PyBytes_AsString(found), (size_t)PyBytes_Size(found) };
    }
    if (to->path.length == 0) { /* servers need not give it; `path` has been decoded */
        found = lookup(state, request, dict, NAME_path);
        tg_text decoded;
        if (found && (!tgpy_request_str(request, found, "scope[\"path\"]", &decoded) ||
                      !encode_path(request, (tg_text){ NULL, 0 }, decoded)))
            return false;
    }
    found = lookup(state, request, dict, NAME_query_string); /* no part of raw_path */
    if (found) {
        if (!PyBytes_Check(found))
            return wrong_type("scope[\"query_string\"]", "bytes or None", found);
        to->query = (tg_text){ PyBytes_AsString(found), (size_t)PyBytes_Size(found) };
    }
    return !PyErr_Occurred();
}

/* What the judging asks for after all: a tg_request_reader. */
static tg_status
read_late(void *reading, unsigned parts, tg_error *error)
{
    tgpy_request *request = reading;
    request->request.unread &= ~parts;
    bool done = !(parts & TG_READ_TARGET) || read_target(request->state, request, request->dict);
    if (done && (parts & TG_READ_HEADERS) && request->late_headers && !read_headers(request, request->late_headers)) {
        request->request.header_count = 0;
        request->request.host = (tg_text){ NULL, 0 };
        done = (parts & TG_READ_GLANCE) != 0;
        if (done)
            PyErr_Clear();
    }
    if (done)
        return TG_OK;
    error->status = TG_E_ARG; /* the exception says what is wrong */
    return TG_E_ARG;
}

/* What can run no Python code, and so comes last. `headers` are a list or a tuple, or NULL. */
static inline bool
read_rest(tgpy_state *state, tgpy_request *request, PyObject *dict, PyObject *headers, unsigned later)
{
    tg_request *to = &request->request;
    PyObject *found = lookup(state, request, dict, NAME_method);
    if (found && !read_ascii(found, &to->method) && !tgpy_request_str(request, found, "scope[\"method\"]", &to->method))
        return false;
    if (!found)
        to->method = (tg_text){ "GET", 3 }; /* a WebSocket's handshake (RFC 6455 section 4.1) */
    if (!(later & TG_READ_TARGET) && !read_target(state, request, dict))
        return false;
    found = lookup(state, request, dict, NAME_client);
    if (found && !read_client(request, found))
        return false;
    if (headers && !(later & TG_READ_HEADERS) && !read_headers(request, headers))
        return false;
    return !PyErr_Occurred();
}

bool
tgpy_request_of_scope(tgpy_state *state, tgpy_request *request, PyObject *scope, PyObject *route, PyObject *user)
{
    request_init(request);
    PyObject *dict = dict_of(request, scope, "scope");
    if (!dict || !read_given(request, route, user))
        return false;
    PyObject *found = lookup(state, request, dict, NAME_type);
    if (found && !is_word(found, state->names[NAME_http]) && !is_word(found, state->names[NAME_websocket])) {
        request->unjudged = true; /* lifespan, and what later specifications bring: no request of a client's */
        return true;
    }
    if (!PyErr_Occurred() && request->request.user.length == 0) {
        found = lookup(state, request, dict, NAME_user);
        if (found && !read_scope_user(state, request, found))
            return false;
    }
    PyObject *headers = PyErr_Occurred() ? NULL : lookup(state, request, dict, NAME_headers);
    if (headers) {
        headers = collection_of(request, headers);
        if (!headers)
            return false;
    }
    return !PyErr_Occurred() && read_rest(state, request, dict, headers, 0);
}

TGPY_HOT bool
tgpy_request_of_scope_late(tgpy_state *state, tgpy_request *request, PyObject *scope, tg_text route, bool user,
                           unsigned later)
{
    request_init(request);
    request->request.route = route;
    if (!hold(request, Py_NewRef(scope)))
        return false;
    PyObject *found = user ? lookup(state, request, scope, NAME_user) : NULL;
    if (found && !read_scope_user(state, request, found))
        return false;
    PyObject *headers = PyErr_Occurred() ? NULL : lookup(state, request, scope, NAME_headers);
    if (headers && !PyList_CheckExact(headers) && !PyTuple_CheckExact(headers)) {
        headers = collection_of(request, headers);
        if (!headers)
            return false;
    }
    request->late_headers = headers;
    request->state = state;
    request->dict = scope;
    request->request.unread = later;
    request->request.read = read_late;
    request->request.reading = request;
    return !PyErr_Occurred() && read_rest(state, request, scope, headers, later);
}

/* ---- WSGI ---- */

/* HTTP_X_NAME as X_NAME: to the core '_' equals '-' in a name. */
static bool
read_environ_headers(const tgpy_state *state, tgpy_request *request, PyObject *dict)
{
    Py_ssize_t position = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &position, &key, &value)) {
        if (!PyUnicode_Check(key) || !PyUnicode_Check(value))
            continue; /* wsgi.input and the like; servers and middlewares put what they please here */
        Py_ssize_t length = 0;
        const char *name = PyUnicode_AsUTF8AndSize(key, &length);
        if (!name) {
            PyErr_Clear();
            continue;
        }
        size_t prefix = 5;
        if (length <= 5 || memcmp(name, "HTTP_", 5) != 0) {
            prefix = 0;
            if (!is_word(key, state->names[NAME_CONTENT_TYPE]) && !is_word(key, state->names[NAME_CONTENT_LENGTH]))
                continue;
        }
        tg_header *header = header_slot(request);
        if (!header)
            return false;
        header->name = (tg_text){ name + prefix, (size_t)length - prefix };
        if (!read_native(request, value, "a header of environ", &header->value))
            return false;
    }
    return true;
}

/* Whether a raw URI is what its server understood: a path, or a scheme with host and path. Of anything else, and of
 * control characters, a server may have dropped a part, so that a client would be served one path and judged by another;
 * then what the server made of it counts. */
static bool
is_target(tg_text raw)
{
    if (raw.length == 0 || (raw.data[0] != '/' && !memmem(raw.data, raw.length, "://", 3)))
        return false;
    for (size_t i = 0; i < raw.length; i++)
        if ((unsigned char)raw.data[i] <= ' ')
            return false;
    return true;
}

bool
tgpy_request_of_environ(tgpy_state *state, tgpy_request *request, PyObject *given, PyObject *route, PyObject *user)
{
    request_init(request);
    tg_request *to = &request->request;
    PyObject *dict = dict_of(request, given, "environ");
    if (!dict || !read_given(request, route, user))
        return false;

    /* From here on no Python code runs. */
    PyObject *found = lookup(state, request, dict, NAME_REQUEST_METHOD);
    if (found && !read_native(request, found, "environ[\"REQUEST_METHOD\"]", &to->method))
        return false;
    static const tgpy_name raw[] = { NAME_RAW_URI, NAME_REQUEST_URI }; /* gunicorn, werkzeug; uWSGI, mod_wsgi */
    for (size_t i = 0; i < 2 && to->path.length == 0; i++) {
        found = lookup(state, request, dict, raw[i]);
        if (found && !read_native(request, found, "the raw URI of environ", &to->path))
            return false;
    }
    if (!is_target(to->path)) {
        tg_text mount = { NULL, 0 }, rest = { NULL, 0 };
        found = lookup(state, request, dict, NAME_SCRIPT_NAME);
        if (found && !read_native(request, found, "environ[\"SCRIPT_NAME\"]", &mount))
            return false;
        found = lookup(state, request, dict, NAME_PATH_INFO);
        if (found && !read_native(request, found, "environ[\"PATH_INFO\"]", &rest))
            return false;
        if ((to->path.length == 0 || mount.length + rest.length > 0) && !encode_path(request, mount, rest))
            return false;
    }
    tg_text peer = { NULL, 0 };
    found = lookup(state, request, dict, NAME_REMOTE_ADDR);
    if (found && !read_native(request, found, "environ[\"REMOTE_ADDR\"]", &peer))
        return false;
    to->peer = peer_of(peer);
    /* werkzeug's ProxyFix keeps what it found and puts the client in the peer's place; as for uvicorn, not to be walked
     * twice. */
    found = lookup(state, request, dict, NAME_proxy_fix);
    if (found && PyDict_Check(found)) {
        PyObject *before = lookup(state, request, found, NAME_REMOTE_ADDR);
        tg_text was = { NULL, 0 };
        if (before && !read_native(request, before, "the peer that ProxyFix replaced", &was))
            return false;
        to->client_resolved = was.length != peer.length || memcmp(was.data, peer.data, peer.length) != 0;
    }
    found = lookup(state, request, dict, NAME_HTTP_HOST);
    if (!found && !PyErr_Occurred())
        found = lookup(state, request, dict, NAME_SERVER_NAME);
    if (found && !read_native(request, found, "environ[\"HTTP_HOST\"]", &to->host))
        return false;
    if (to->user.length == 0) {
        found = lookup(state, request, dict, NAME_REMOTE_USER);
        if (found && !read_native(request, found, "environ[\"REMOTE_USER\"]", &to->user))
            return false;
    }
    if (PyErr_Occurred() || !read_environ_headers(state, request, dict))
        return false;
    to->headers = request->headers;
    return true;
}
