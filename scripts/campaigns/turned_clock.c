/* Turn the wall clock of the process that this is loaded into (LD_PRELOAD) by as many seconds as a file says: eight
 * bytes, a signed number of this machine's order, mapped, so that a new number holds at once for every process. The
 * monotonic clock stays as it is, as when a clock is set (clock_settime(2)). Sleeps and waits are not touched: those of
 * Python count by the monotonic clock. */

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t nothing = 0;
static const volatile int64_t *offset = &nothing;

__attribute__((constructor)) static void map_offset(void)
{
    const char *path = getenv("TURNED_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        offset = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int status = (int)syscall(SYS_clock_gettime, clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0)
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0)
        return -1;
    if (now != NULL)
        *now = exact.tv_sec;
    return exact.tv_sec;
}
