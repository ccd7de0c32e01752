// What the mock upstream and the load generator share.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;

#define HASH_START 0xcbf29ce484222325u  // FNV-1a
static inline u64 hash(u64 sum, const char *data, size_t size) {
  while (size--) sum = (sum ^ (unsigned char)*data++) * 0x100000001b3u;
  return sum;
}

static inline u64 now(void) {  // ns; the same clock in both programs, so one may subtract the other's
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (u64)time.tv_sec * 1000000000u + (u64)time.tv_nsec;
}

static inline struct sockaddr_in loopback(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

static inline void prepare(void) {
  signal(SIGPIPE, SIG_IGN);
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

static inline void no_delay(int fd) { setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)); }
