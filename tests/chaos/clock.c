/* A machine's clock that is set on or back, for one run alone: wall time is moved by as many seconds as the file named
 * by CHAOS_CLOCK says, an int64. Every other clock stays. Built and preloaded by the driver (LD_PRELOAD). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t moved(void) {
    static volatile int64_t *by;
    if (!by) {
        const char *path = getenv("CHAOS_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (file < 0) return 0;
        void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (mapped == MAP_FAILED) return 0;
        by = mapped;
    }
    return *by;
}

int clock_gettime(clockid_t id, struct timespec *to) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, to);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) to->tv_sec += moved();
    return result;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(to, zone);
    if (!result) to->tv_sec += moved();
    return result;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
