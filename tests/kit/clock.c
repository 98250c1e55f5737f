/* SPDX-License-Identifier: Apache-2.0 */
/*
 * To be preloaded: the process's time of day is the kernel's and as many seconds more as the file
 * says that $CLOCK_SHIFT names (8 bytes, mapped, so that they may change). Other clocks stay.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile long *shift;

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("CLOCK_SHIFT");
	int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	void *mapped;

	if (file < 0)
		return;
	mapped = mmap(NULL, sizeof(*shift), PROT_READ, MAP_SHARED, file, 0);
	if (mapped != MAP_FAILED)
		shift = mapped;
	close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	int result = syscall(SYS_clock_gettime, clock, now);

	if (!result && clock == CLOCK_REALTIME && shift)
		now->tv_sec += *shift;
	return result;
}

time_t time(time_t *now)
{
	struct timespec found;

	clock_gettime(CLOCK_REALTIME, &found);
	if (now)
		*now = found.tv_sec;
	return found.tv_sec;
}
