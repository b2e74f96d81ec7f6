//! Medians and percentiles.

/// Returns the median: of an even number of values, the mean of the middle two.
///
/// # Panics
///
/// If there are no values.
#[must_use]
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// Returns the smallest value that at least `percent` of all values do not exceed. The values must be sorted.
///
/// # Panics
///
/// If there are no values.
#[must_use]
pub fn percentile<T: Copy>(sorted: &[T], percent: usize) -> T {
    sorted[(sorted.len() * percent).div_ceil(100).saturating_sub(1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_numbers_of_values() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&mut [7.0]), 7.0);
    }

    #[test]
    fn percentile_is_one_of_the_values() {
        let hundred: Vec<u32> = (1..=100).collect();
        assert_eq!([0, 1, 50, 99, 100].map(|percent| percentile(&hundred, percent)), [1, 1, 50, 99, 100]);
        assert_eq!([0, 50, 51, 99].map(|percent| percentile(&[1, 2], percent)), [1, 1, 2, 2]);
        assert_eq!(percentile(&[9], 99), 9);
    }
}
