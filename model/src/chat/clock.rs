//! `strftime_now` of the templates: the present moment in UTC, in the directives of C's `strftime`.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970-01-01T00:00:00Z.
pub(super) fn now_seconds() -> i64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(elapsed.as_secs()).unwrap_or(i64::MAX)
}

/// Formats a moment. An unknown directive is the error.
pub(super) fn strftime(format: &str, seconds: i64) -> Result<String, String> {
    let moment = Moment::at(seconds);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut directive = characters.next();
        // A hyphen asks for numbers without padding.
        let plain = directive == Some('-');
        if plain {
            directive = characters.next();
        }
        let field = directive.and_then(|directive| moment.field(directive)).ok_or_else(|| {
            let directive: String = directive.into_iter().collect();
            format!("strftime_now does not know %{directive}")
        })?;
        let field = match plain && field.len() > 1 {
            true => field.trim_start_matches('0'),
            false => &field,
        };
        text.push_str(if field.is_empty() { "0" } else { field });
    }
    Ok(text)
}

struct Moment {
    year: i64,
    /// 0 for January.
    month: usize,
    day: i64,
    /// 0 for Sunday.
    weekday: usize,
    day_of_year: i64,
    second_of_day: i64,
    seconds: i64,
}

impl Moment {
    fn at(seconds: i64) -> Self {
        let (days, second_of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        let (mut year, mut day_of_year) = (1970, days);
        // Whole cycles of 400 years first, then year by year.
        year += day_of_year.div_euclid(DAYS_OF_CYCLE) * 400;
        day_of_year = day_of_year.rem_euclid(DAYS_OF_CYCLE);
        while day_of_year >= days_of_year(year) {
            day_of_year -= days_of_year(year);
            year += 1;
        }
        let (mut month, mut day) = (0, day_of_year);
        while day >= days_of_month(year, month) {
            day -= days_of_month(year, month);
            month += 1;
        }
        // 1970-01-01 was a Thursday.
        let weekday = (days + 4).rem_euclid(7) as usize;
        Self { year, month, day: day + 1, weekday, day_of_year, second_of_day, seconds }
    }

    fn field(&self, directive: char) -> Option<String> {
        let (hour, minute) = (self.second_of_day / 3600, self.second_of_day / 60 % 60);
        let second = self.second_of_day % 60;
        let two = |number: i64| format!("{number:02}");
        let field = match directive {
            'Y' => self.year.to_string(),
            'y' => two(self.year.rem_euclid(100)),
            'm' => two(self.month as i64 + 1),
            'd' => two(self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year + 1),
            'B' => MONTHS[self.month].to_owned(),
            'b' | 'h' => MONTHS[self.month][..3].to_owned(),
            'A' => WEEKDAYS[self.weekday].to_owned(),
            'a' => WEEKDAYS[self.weekday][..3].to_owned(),
            'w' => self.weekday.to_string(),
            'H' => two(hour),
            'I' => two((hour + 11) % 12 + 1),
            'p' => (if hour < 12 { "AM" } else { "PM" }).to_owned(),
            'M' => two(minute),
            'S' => two(second),
            'F' => format!("{}-{}-{}", self.year, two(self.month as i64 + 1), two(self.day)),
            'T' => format!("{}:{}:{}", two(hour), two(minute), two(second)),
            's' => self.seconds.to_string(),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        };
        Some(field)
    }
}

const DAYS_OF_CYCLE: i64 = 146_097;
const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_of_year(year: i64) -> i64 {
    365 + i64::from(is_leap(year))
}

fn days_of_month(year: i64, month: usize) -> i64 {
    match month {
        1 => 28 + i64::from(is_leap(year)),
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::strftime;

    /// Expected strings are those of GNU `date -u -d @SECONDS +FORMAT`.
    #[test]
    fn formats_moments() {
        for (seconds, format, expected) in [
            (0, "%Y-%m-%d %H:%M:%S %A %B %j", "1970-01-01 00:00:00 Thursday January 001"),
            (951_782_400, "%F %T %a %b %-d %e", "2000-02-29 00:00:00 Tue Feb 29 29"),
            (1_735_689_599, "%d %b %Y, %I:%M %p", "31 Dec 2024, 11:59 PM"),
            (1_709_164_800, "%-m/%-d/%y %w %%", "2/29/24 4 %"),
            (-1, "%F %T", "1969-12-31 23:59:59"),
            (4_107_542_400, "%F %A", "2100-03-01 Monday"),
        ] {
            assert_eq!(strftime(format, seconds).as_deref(), Ok(expected), "{seconds}");
        }
        assert_eq!(strftime("%-H", 0).as_deref(), Ok("0"));
        assert!(strftime("%Q", 0).unwrap_err().contains("%Q"));
        assert!(strftime("%", 0).is_err());
    }
}
