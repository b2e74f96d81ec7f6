//! Medians and percentiles.

/// The middle one; the mean of the middle two if there is no middle.
///
/// # Panics
///
/// If there is none at all.
#[must_use]
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// The least value that at least `percent` of all are not above. Takes them in order.
///
/// # Panics
///
/// If there is none at all.
#[must_use]
pub fn percentile<T: Copy>(sorted: &[T], percent: usize) -> T {
    sorted[(sorted.len() * percent).div_ceil(100).saturating_sub(1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&mut [7.0]), 7.0);
    }

    #[test]
    fn a_percentile_is_a_value_that_was_seen() {
        let hundred: Vec<u32> = (1..=100).collect();
        assert_eq!([0, 1, 50, 99, 100].map(|percent| percentile(&hundred, percent)), [1, 1, 50, 99, 100]);
        assert_eq!([0, 50, 51, 99].map(|percent| percentile(&[1, 2], percent)), [1, 1, 2, 2]);
        assert_eq!(percentile(&[9], 99), 9);
    }
}
