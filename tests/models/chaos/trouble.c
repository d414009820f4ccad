/* Loaded into the processes of a node (LD_PRELOAD): shifts their clock, and has writes to one disk
   fail or wait, as a file says that they all map. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct trouble { /* as in trouble.py */
    int64_t clock_s;
    uint64_t disk;
    int64_t error;
    int64_t delay_us;
};

static volatile struct trouble *trouble;

__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("CHAOS_TROUBLE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *found = fd < 0 ? MAP_FAILED : mmap(0, sizeof *trouble, PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (found != MAP_FAILED) trouble = found;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int fails(int fd) {
    struct stat found;
    if (!trouble || !(trouble->error || trouble->delay_us)) return 0;
    if (fstat(fd, &found) || found.st_dev != trouble->disk) return 0;
    if (trouble->delay_us) usleep(trouble->delay_us);
    if (trouble->error) errno = trouble->error;
    return trouble->error != 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (trouble && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += trouble->clock_s;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday);
    int result = real(now, zone);
    if (trouble && now) now->tv_sec += trouble->clock_s;
    return result;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

ssize_t write(int fd, const void *bytes, size_t count) {
    REAL(write);
    return fails(fd) ? -1 : real(fd, bytes, count);
}

ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t at) {
    REAL(pwrite64);
    return fails(fd) ? -1 : real(fd, bytes, count, at);
}

int fsync(int fd) {
    REAL(fsync);
    return fails(fd) ? -1 : real(fd);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    return fails(fd) ? -1 : real(fd);
}
