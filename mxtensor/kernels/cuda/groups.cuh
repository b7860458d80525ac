// Groups of rows of x: which of them a block takes, and the rows of the result that belong to none.

// The end of a group, not after the last row: the ends are data.
DEVICE u32 end_of_group(const Arguments& a, u32 group) {
    u32 end = load_fresh(a.ends + group);
    return end < a.m ? end : a.m;
}
DEVICE u32 start_of_group(const Arguments& a, u32 group) { return group ? load_fresh(a.ends + group - 1) : 0; }

// The group that has rows and comes after ``before`` other ones that have; a.groups if there is none. The whole warp.
DEVICE u32 group_with_rows(const Arguments& a, u32 before) {
    constexpr u32 AT_ONCE = 4;  // loads that a lane waits for together
    for (u32 first = 0; first < a.groups; first += 32 * AT_ONCE) {
        bool has_rows[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            u32 group = first + 32 * i + lane_of_warp();
            has_rows[i] = group < a.groups && start_of_group(a, group) < end_of_group(a, group);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            u32 marks = votes_of_warp(has_rows[i]), count = bits_set(marks);
            if (before < count) {
                for (; before > 0; before--) marks &= marks - 1;
                return first + 32 * i + lowest_bit(marks);
            }
            before -= count;
        }
    }
    return a.groups;
}

// Writes zeros to columns ``row`` to ``row + rows`` of the result, in all rows after the last group.
DEVICE void zeros_after_groups(const Arguments& a, const Weight& w, u32 row, u32 rows) {
    for (u64 m = end_of_group(a, a.groups - 1); m < a.m; m++)
        for (u32 n = thread(); n < rows; n += THREADS) {
            u64 to = m * w.n + row + n;
            if constexpr (RESULT == FLOAT) static_cast<float*>(w.y)[to] = 0;
            else static_cast<u16*>(w.y)[to] = 0;
        }
}
