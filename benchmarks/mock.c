// Mock upstream: mock PORT. One thread; one send(2) for each event, at its time.
//   POST with "stream":true in its body   an event stream; the query says n=EVENTS&gap=NANOSECONDS (the same in one run)
//   any other POST                        a short JSON reply that ends with a hash of the request's body
//   GET                                   how many streams there were, and how many were aborted
#include "sse.h"

typedef struct conn {
  int fd;
  size_t used;
  char in[16384];
  int streaming;
  long left, seq, id;
  u64 due, gap, sum;
  char tail[512];  // of an event that the socket took only in part
  size_t tail_size;
  struct conn *before, *after;  // streams in the order of their next event
} conn;

static conn queue = {.before = &queue, .after = &queue};
static int poller;
static long streams, aborted, events_sent;

static void leave(conn *c) { c->before->after = c->after, c->after->before = c->before; }

static void enter(conn *c) {  // from the back: all have the same gap, so it mostly belongs there
  conn *place = queue.before;
  while (place != &queue && place->due > c->due) place = place->before;
  c->before = place, c->after = place->after;
  place->after->before = c, place->after = c;
}

static void drop(conn *c) {
  if (c->streaming) leave(c), aborted++;
  close(c->fd);
  free(c);
}

static int put(conn *c, const char *data, size_t size) {  // 0: gone
  ssize_t sent = send(c->fd, data, size, MSG_NOSIGNAL);
  if (sent < 0 && errno != EAGAIN) return 0;
  if (sent < 0) sent = 0;
  c->tail_size = size - (size_t)sent;
  memcpy(c->tail, data + sent, c->tail_size);
  return 1;
}

static int next_event(conn *c) {  // 0: gone
  if (c->tail_size) {  // a slow reader: its event is late, not lost
    c->due += 1000000;
    char rest[sizeof c->tail];
    size_t size = c->tail_size;
    memcpy(rest, c->tail, size);
    return put(c, rest, size);
  }
  char event[480], out[512];
  int size;
  if (c->seq < c->left)
    size = sprintf(event, "data: {\"id\":\"chatcmpl-%032lx\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
      "\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word %08ld %020lu\"},\"logprobs\":null,"
      "\"finish_reason\":null}],\"service_tier\":null}\n\n", c->id, c->seq, now());
  else
    size = sprintf(event, ": sum %016lx\n\ndata: [DONE]\n\n", c->sum);
  c->sum = hash(c->sum, event, (size_t)size);
  int framed = sprintf(out, "%x\r\n%s\r\n%s", size, event, c->seq < c->left ? "" : "0\r\n\r\n");
  if (!put(c, out, (size_t)framed)) return 0;
  events_sent++;
  c->due += c->gap;
  return c->seq++ < c->left ? 1 : 2;
}

static void tick(void) {
  while (queue.after != &queue && queue.after->due <= now()) {
    conn *c = queue.after;
    leave(c);
    int state = next_event(c);
    if (state == 2) c->streaming = 0;
    else if (state) enter(c);
    else c->streaming = 0, aborted++, drop(c);
  }
}

static void answer(conn *c, char *body, size_t size) {
  char text[512], out[1024];
  int length;
  if (*c->in == 'G') {
    length = sprintf(text, "{\"streams\":%ld,\"aborted\":%ld,\"events\":%ld}", streams, aborted, events_sent);
  } else if (memmem(body, size, "\"stream\":true", 13)) {
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
      "transfer-encoding: chunked\r\n\r\n";
    char *query = memchr(c->in, '?', 256);
    if (!query || sscanf(query, "?n=%ld&gap=%lu", &c->left, &c->gap) != 2) c->left = 1, c->gap = 1;
    c->streaming = 1, c->seq = 0, c->sum = HASH_START, c->id = streams++;
    c->due = now() + c->gap * (u64)(c->id * 79 % 128) / 128;  // spread, so that events come one by one
    put(c, head, sizeof head - 1);
    enter(c);
    return;
  } else {
    length = sprintf(text, "{\"id\":\"chatcmpl-%032lx\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"mock\","
      "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"A short reply.\"},\"finish_reason\":\"stop\"}],"
      "\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":4},\"service_tier\":\"%016lx\"}",
      events_sent, hash(HASH_START, body, size));
  }
  length = sprintf(out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", length, text);
  put(c, out, (size_t)length);
}

static int receive(conn *c) {  // 0: gone
  ssize_t got = recv(c->fd, c->in + c->used, sizeof c->in - 1 - c->used, 0);
  if (got <= 0) return got < 0 && errno == EAGAIN;
  c->in[c->used += (size_t)got] = 0;
  char *end = strstr(c->in, "\r\n\r\n"), *length = strcasestr(c->in, "\r\ncontent-length:");
  if (!end) return c->used < sizeof c->in - 1;
  size_t head = (size_t)(end + 4 - c->in), body = length && length < end ? strtoul(length + 17, 0, 10) : 0;
  if (c->used < head + body) return c->used < sizeof c->in - 1;
  answer(c, end + 4, body);
  c->used = 0;  // the load generator does not pipeline
  return 1;
}

int main(int argc, char **argv) {
  prepare();
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
  struct sockaddr_in address = loopback(argc > 1 ? atoi(argv[1]) : 8000);
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, 4096)) return perror("mock"), 1;
  poller = epoll_create1(0);
  struct epoll_event event = {.events = EPOLLIN}, found[256];
  epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
  for (;;) {
    struct timespec wait = {0}, *limit = 0;
    if (queue.after != &queue) {
      u64 time = now(), left = queue.after->due > time ? queue.after->due - time : 0;
      wait.tv_sec = (time_t)(left / 1000000000u), wait.tv_nsec = (long)(left % 1000000000u), limit = &wait;
    }
    int count = epoll_pwait2(poller, found, 256, limit, 0);
    for (int i = 0; i < count; i++) {
      conn *c = found[i].data.ptr;
      if (c) {
        if (!receive(c)) drop(c);
        continue;
      }
      for (int fd; (fd = accept4(listener, 0, 0, SOCK_NONBLOCK)) >= 0;) {
        c = calloc(1, sizeof *c);
        c->fd = fd;
        no_delay(fd);
        event.data.ptr = c;
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
      }
    }
    tick();
  }
}
