// Load generator. One thread; checks every byte; prints one line of JSON.
//   load PORT stream CONNECTIONS EVENTS RATE [HANGUP_MS]   event streams; HANGUP_MS: leave each so long after its start
//   load PORT short CONNECTIONS SECONDS                    short requests on connections that are kept
#include "sse.h"

enum { CONNECTING, HEAD, SIZE, DATA, AFTER_DATA, LENGTH, OVER };

typedef struct {
  int fd, state, done, wrong;
  u64 sent, sum, left, leave_at;
  long seq;
  char head[4096], line[32], event[1024];  // event: the one that is arriving
  size_t head_size, line_size, event_size;
} conn;

static int poller, port, shorts;
static long wanted, ok, altered, failed, hung_up, events;
static u64 gap, first_event, last_event, finish_at;
static float *delays, *firsts;
static long delays_size, firsts_size;
static char body[256];
static u64 body_sum;

static void add(float **list, long *size, u64 ns) {
  if (!(*size & (*size - 1))) *list = realloc(*list, (size_t)(*size ? *size * 2 : 1) * sizeof(float));
  (*list)[(*size)++] = (float)ns / 1000;
}
static int ascending(const void *a, const void *b) { return (*(float *)a > *(float *)b) - (*(float *)a < *(float *)b); }
static float quantile(float *list, long size, double share) { return size ? list[(long)(share * (double)(size - 1))] : 0; }

static void request(conn *c) {
  char out[1024];
  int size = sprintf(out, "POST /v1/chat/completions?n=%ld&gap=%lu HTTP/1.1\r\nhost: localhost:%d\r\nuser-agent: load\r\n"
    "authorization: Bearer none\r\ncontent-type: application/json\r\naccept: */*\r\ncontent-length: %zu\r\n\r\n%s",
    wanted, gap, port, strlen(body), body);
  c->state = HEAD, c->done = c->wrong = 0, c->sum = HASH_START, c->seq = 0, c->head_size = c->line_size = c->event_size = 0;
  c->sent = now();
  if (send(c->fd, out, (size_t)size, MSG_NOSIGNAL) != size) c->state = OVER;
}

static void open_one(conn *c) {
  struct sockaddr_in address = loopback(port);
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  no_delay(c->fd);
  c->state = CONNECTING;
  if (connect(c->fd, (void *)&address, sizeof address) && errno != EINPROGRESS) c->state = OVER;
  struct epoll_event event = {.events = EPOLLOUT, .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
}

static void stream_event(conn *c, u64 time) {
  char *text = c->event, *mark;
  text[c->event_size] = 0;
  if ((mark = strstr(text, " word "))) {
    long seq = strtol(mark + 6, 0, 10);
    u64 stamp = strtoul(mark + 15, 0, 10);
    if (seq != c->seq++) c->wrong = 1;
    add(&delays, &delays_size, time > stamp ? time - stamp : 0);
    if (!seq) add(&firsts, &firsts_size, time - c->sent);
    if (!first_event) first_event = time;
    last_event = time, events++;
  } else if (!strncmp(text, ": sum ", 6)) {
    c->wrong |= strtoul(text + 6, 0, 16) != c->sum || c->seq != wanted;
  } else if (!strncmp(text, "data: [DONE]", 12)) {
    c->done = 1;
  } else {
    c->wrong = 1;
  }
  c->sum = hash(c->sum, text, c->event_size);
  c->event_size = 0;
}

static void take(conn *c, const char *data, size_t size, u64 time) {
  for (; size--; data++) {
    if (c->event_size < sizeof c->event - 1) c->event[c->event_size++] = *data;
    if (!shorts && *data == '\n' && c->event_size > 1 && c->event[c->event_size - 2] == '\n') stream_event(c, time);
  }
}

static void check_short(conn *c) {
  c->event[c->event_size] = 0;
  char *mark = strstr(c->event, "\"service_tier\":\"");
  c->done = 1, c->wrong = !mark || strtoul(mark + 16, 0, 16) != body_sum;
}

static void parse(conn *c, const char *data, size_t size, u64 time) {
  while (size && c->state != OVER) {
    if (c->state == HEAD || c->state == SIZE || c->state == AFTER_DATA) {
      char byte = *data++;
      size--;
      if (c->state == HEAD) {
        if (c->head_size == sizeof c->head - 1) { c->state = OVER; return; }
        c->head[c->head_size++] = byte, c->head[c->head_size] = 0;
        if (c->head_size < 4 || memcmp(c->head + c->head_size - 4, "\r\n\r\n", 4)) continue;
        char *length = strcasestr(c->head, "\r\ncontent-length:");
        c->left = length ? strtoul(length + 17, 0, 10) : 0;
        c->state = strncmp(c->head + 9, "200", 3) ? OVER : length ? LENGTH : SIZE;
      } else if (byte == '\n') {
        c->line[c->line_size] = 0;
        if (c->state == AFTER_DATA || (c->left = strtoul(c->line, 0, 16))) c->state = c->state == SIZE ? DATA : SIZE;
        else c->state = OVER;  // the last chunk; its two bytes more do not matter on a connection that is not kept
        c->line_size = 0;
      } else if (c->line_size < sizeof c->line - 1) {
        c->line[c->line_size++] = byte;
      }
      continue;
    }
    size_t part = size < c->left ? size : c->left;
    take(c, data, part, time);
    data += part, size -= part, c->left -= part;
    if (c->left) continue;
    if (c->state == LENGTH) check_short(c), c->state = OVER;
    else c->state = AFTER_DATA;
  }
}

static int over(conn *c) {  // 1: its connection goes on with another request
  if (c->wrong) altered++;
  if (c->done) {
    ok++;
    if (shorts) add(&firsts, &firsts_size, now() - c->sent);
  } else {
    failed++;
  }
  if (!shorts || !c->done || now() > finish_at) return close(c->fd), 0;
  request(c);
  return 1;
}

int main(int argc, char **argv) {
  if (argc < 5) return 2;
  prepare();
  port = atoi(argv[1]), shorts = !strcmp(argv[2], "short");
  long connections = atol(argv[3]), open = connections;
  wanted = shorts ? 1 : atol(argv[4]);
  gap = shorts ? 1 : (u64)(1e9 / atof(argv[5]));
  u64 hang_up = argc > 6 ? strtoul(argv[6], 0, 10) * 1000000u : 0, start = now();
  finish_at = start + (u64)((shorts ? atof(argv[4]) : 60 + (double)wanted * (double)gap / 1e9) * 1e9);
  sprintf(body, "{\"model\":\"mock\",\"messages\":[{\"role\":\"user\",\"content\":\"Tell me a story.\"}],\"max_tokens\":512,"
    "\"temperature\":0.7,\"stream\":%s}", shorts ? "false" : "true");
  body_sum = hash(HASH_START, body, strlen(body));
  poller = epoll_create1(0);
  conn *all = calloc((size_t)connections, sizeof *all);
  for (long i = 0; i < connections; i++) open_one(all + i);
  static char data[1 << 17];
  struct epoll_event found[256];
  while (open && now() < finish_at + 5000000000u) {
    int count = epoll_wait(poller, found, 256, hang_up ? 5 : 100);
    for (int i = 0; i < count; i++) {
      conn *c = found[i].data.ptr;
      if (c->fd < 0) continue;
      if (c->state == CONNECTING) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
        request(c);
        if (hang_up) c->leave_at = now() + hang_up;
        continue;
      }
      ssize_t got = recv(c->fd, data, sizeof data, 0);
      if (got < 0 && errno == EAGAIN) continue;
      if (got <= 0) c->state = OVER;
      else parse(c, data, (size_t)got, now());
      if (c->state == OVER && !over(c)) c->fd = -1, open--;
    }
    for (long i = 0; hang_up && i < connections; i++)
      if (all[i].fd >= 0 && all[i].leave_at && all[i].leave_at < now()) close(all[i].fd), all[i].fd = -1, open--, hung_up++;
  }
  double seconds = (double)(now() - start) / 1e9, active = (double)(last_event - first_event) / 1e9;
  qsort(delays, (size_t)delays_size, sizeof(float), ascending);
  qsort(firsts, (size_t)firsts_size, sizeof(float), ascending);
  printf("{\"ok\":%ld,\"failed\":%ld,\"altered\":%ld,\"hung_up\":%ld,\"events\":%ld,\"per_s\":%.0f,"
    "\"delay_p50\":%.1f,\"delay_p99\":%.1f,\"first_p50\":%.1f,\"first_p99\":%.1f}\n",
    ok, failed + open, altered, hung_up, events, shorts ? (double)ok / seconds : active > 0 ? (double)events / active : 0,
    quantile(delays, delays_size, .5), quantile(delays, delays_size, .99), quantile(firsts, firsts_size, .5),
    quantile(firsts, firsts_size, .99));
}
