// The same in C++: a FastCGI application with libfcgi, several threads, limited by tidegate.
//
//     c++ -std=c++17 guestbook.cpp $(pkg-config --cflags --libs tidegate-fcgx) -pthread -o guestbook
//     TIDEGATE_CONFIG=rules.yaml ./guestbook /run/guestbook.sock 8
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <tidegate_fcgx.h>

namespace {

struct CloseGate {
    void operator()(tg_gate *gate) const { tg_gate_close(gate); }
};
using Gate = std::unique_ptr<tg_gate, CloseGate>;

std::string read_body(FCGX_Request &request)
{
    std::string body;
    char piece[4096];
    for (int got; (got = FCGX_GetStr(piece, sizeof piece, request.in)) > 0;)
        body.append(piece, static_cast<size_t>(got));
    return body;
}

void serve(tg_gate *gate, int listening)
{
    FCGX_Request request;
    if (FCGX_InitRequest(&request, listening, 0) != 0)
        return;
    while (FCGX_Accept_r(&request) == 0) {
        tidegate_fcgx_call call;
        if (tidegate_fcgx_admit(gate, &request, &call)) { // else it has been answered
            const char *method = FCGX_GetParam("REQUEST_METHOD", request.envp);
            const std::string text = "Content-Type: text/plain\r\n\r\nC++ " + std::string(method ? method : "") + " " +
                                     std::to_string(read_body(request).size()) + " by " + call.judgement.policy + "\n";
            tidegate_fcgx_put_fields(&request, &call);
            FCGX_PutStr(text.data(), static_cast<int>(text.size()), request.out);
        }
        FCGX_Finish_r(&request);
    }
}

} // namespace

int main(int count, char **arguments)
{
    const int threads = count == 3 ? std::atoi(arguments[2]) : 1;
    if (count < 2 || threads < 1) {
        std::fprintf(stderr, "usage: guestbook SOCKET [THREADS]\n");
        return 2;
    }
    tg_gate *opened = nullptr;
    tg_error error;
    if (tidegate_fcgx_open(nullptr, &opened, &error) != TG_OK) {
        std::fprintf(stderr, "guestbook: %s\n", error.message);
        return 1;
    }
    const Gate gate(opened);
    if (FCGX_Init() != 0)
        return 1;
    const int listening = FCGX_OpenSocket(arguments[1], 128);
    if (listening < 0)
        return 1;
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++)
        others.emplace_back(serve, gate.get(), listening);
    serve(gate.get(), listening);
    for (std::thread &other : others)
        other.join();
    return 0;
}
